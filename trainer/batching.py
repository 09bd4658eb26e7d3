"""Datums to micro-batches.

The packing rule looks at nothing but the lengths of the operation's datums and one setting: what other sessions do
cannot change a micro-batch, so a replay computes the same bits. Suffixes: B datums of a micro-batch, T padded
positions, P real positions laid end to end.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gateway.core.tensors import Datum, DType, TensorData

_DTYPES: Mapping[DType, torch.dtype] = {DType.FLOAT32: torch.float32, DType.INT64: torch.int64}
_LEAST_FILL = 0.75  # a datum joins a micro-batch only if it fills this share of the longest one's row


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Right-padded token rows, and the loss inputs without padding.

    ``rows[b]`` is the index in the operation of the datum in row b. No attention mask is needed: under causal
    attention a real position never sees the padding to its right.
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens_BT: Tensor
    real_BT: Tensor
    targets_P: Tensor
    inputs: Mapping[str, Tensor]


def plan(lengths: Sequence[int], token_budget: int) -> list[tuple[int, ...]]:
    """Group datum indices into micro-batches of at most ``token_budget`` padded tokens, longest first.

    A datum longer than the budget gets a micro-batch of its own. At most a quarter of a micro-batch is padding.
    """
    groups: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = groups and longest * (len(groups[-1]) + 1) <= token_budget and lengths[index] >= _LEAST_FILL * longest
        if fits:
            groups[-1].append(index)
        else:
            groups.append([index])
            longest = lengths[index]
    return [tuple(sorted(group)) for group in groups]


def assemble(data: Sequence[Datum], rows: Sequence[int], device: torch.device) -> MicroBatch:
    """Build the tensors of the datums ``rows`` (indices into ``data``)."""
    chosen = [data[index] for index in rows]
    lengths = tuple(datum.length for datum in chosen)
    tokens_BT = torch.zeros((len(chosen), max(lengths)), dtype=torch.int64)
    for row, datum in enumerate(chosen):
        tokens_BT[row, : lengths[row]] = to_tensor(datum.model_input)
    real_BT = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]
    joined = {
        name: torch.cat([_input(datum, name) for datum in chosen]).to(device)
        for name in sorted({name for datum in chosen for name in datum.loss_fn_inputs})
    }
    return MicroBatch(
        rows=tuple(rows),
        lengths=lengths,
        tokens_BT=tokens_BT.to(device),
        real_BT=real_BT.to(device),
        targets_P=joined.pop("target_tokens"),
        inputs=joined,
    )


def to_tensor(tensor: TensorData) -> Tensor:
    """Return a copy of the elements on the CPU."""
    if sys.byteorder == "big":
        return torch.tensor(tensor.values(), dtype=_DTYPES[tensor.dtype]).reshape(tensor.shape)
    if not tensor.data:
        return torch.empty(tensor.shape, dtype=_DTYPES[tensor.dtype])
    return torch.frombuffer(bytearray(tensor.data), dtype=_DTYPES[tensor.dtype]).reshape(tensor.shape)


def to_data(values: Tensor) -> TensorData:
    """Pack a float tensor as float32 for the wire."""
    flat = values.detach().to("cpu", torch.float32).contiguous()
    return TensorData(dtype=DType.FLOAT32, shape=tuple(flat.shape), data=flat.numpy().astype("<f4").tobytes())


def _input(datum: Datum, name: str) -> Tensor:
    """Return an input of a datum; an optional ``weights`` that only its neighbours carry is one everywhere."""
    tensor = datum.loss_fn_inputs.get(name)
    return torch.ones(datum.length) if tensor is None else to_tensor(tensor)
