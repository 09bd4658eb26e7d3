"""Datums to micro-batches.

The packing rule looks at nothing but the lengths of the operation's datums and one setting: what other sessions do
cannot change a micro-batch, so a replay computes the same bits. Suffixes: B datums of a micro-batch, T padded
positions, P real positions laid end to end, Q targets: K for every position of a datum with ``[N, K]`` targets.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from gateway.core.loss_inputs import SAMPLER_VERSION
from gateway.core.tensors import Datum, DType, TensorData

_DTYPES: Mapping[DType, torch.dtype] = {DType.FLOAT32: torch.float32, DType.INT64: torch.int64}
_NO_FILLS: Mapping[str, float] = MappingProxyType({"weights": 1.0})
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
    targets: Tensor
    real_PK: Tensor | None
    inputs: Mapping[str, Tensor]
    temperature_P: Tensor | None
    shapes: tuple[tuple[int, ...], ...]

    def target_tables(self) -> list[Tensor]:
        """Return each row's target tokens in their own shape, without padding."""
        return self.split(self.targets if self.real_PK is None else self.targets[self.real_PK])

    def split(self, values_Q: Tensor) -> list[Tensor]:
        """Return each row's part, shaped like its target tokens."""
        parts = torch.split(values_Q, [math.prod(shape) for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


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


def assemble(
    data: Sequence[Datum], rows: Sequence[int], device: torch.device, fills: Mapping[str, float] = _NO_FILLS
) -> MicroBatch:
    """Build the tensors of the datums ``rows`` (indices into ``data``).

    Args:
        fills: what an optional input is, by name, where a datum lacks it and its neighbour has it. A ``temperature``
            other than 1 also counts where no datum has one.
    """
    chosen = [data[index] for index in rows]
    lengths = tuple(datum.length for datum in chosen)
    tokens_BT = torch.zeros((len(chosen), max(lengths)), dtype=torch.int64)
    for row, datum in enumerate(chosen):
        tokens_BT[row, : lengths[row]] = to_tensor(datum.model_input)
    real_BT = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]
    names = sorted({name for datum in chosen for name in datum.loss_fn_inputs} - {"target_tokens", SAMPLER_VERSION})
    if fills.get("temperature", 1.0) != 1.0:
        names = sorted({*names, "temperature"})
    joined = {name: torch.cat([_input(datum, name, fills) for datum in chosen]).to(device) for name in names}
    targets, real_PK = _join_targets([to_tensor(datum.loss_fn_inputs["target_tokens"]) for datum in chosen])
    return MicroBatch(
        rows=tuple(rows),
        lengths=lengths,
        tokens_BT=tokens_BT.to(device),
        real_BT=real_BT.to(device),
        targets=targets.to(device),
        real_PK=None if real_PK is None else real_PK.to(device),
        temperature_P=joined.pop("temperature", None),
        inputs=joined,
        shapes=tuple(datum.loss_fn_inputs["target_tokens"].shape for datum in chosen),
    )


def _join_targets(targets: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Lay targets end to end; with alternatives, padded to the most of them, and a mask of what is no padding."""
    if all(target.dim() == 1 for target in targets):
        return torch.cat(list(targets)), None
    tables = [target if target.dim() == 2 else target[:, None] for target in targets]
    most = max(table.shape[1] for table in tables)
    padded = [torch.nn.functional.pad(table, (0, most - table.shape[1])) for table in tables]
    real = [(torch.arange(most) < table.shape[1]).expand(table.shape[0], most) for table in tables]
    return torch.cat(padded), torch.cat(real)


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


def _input(datum: Datum, name: str, fills: Mapping[str, float]) -> Tensor:
    """Return an input of a datum, flat; a ``temperature`` of one number holds for every position."""
    tensor = datum.loss_fn_inputs.get(name)
    if tensor is None:
        return torch.full((datum.length,), fills[name])
    values = to_tensor(tensor).flatten()
    return values.expand(datum.length) if name == "temperature" and values.shape == (1,) else values
