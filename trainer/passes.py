"""The two ways through the base model: the lean decoder where it is exact, plain transformers + PEFT elsewhere.

Which one computes an operation depends on the model and on that operation alone, so a replay takes the same way.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gateway.core.tensors import Datum, TensorData
from trainer import decoder
from trainer.adapters import AdapterBank
from trainer.batching import MicroBatch, assemble, plan
from trainer.language_model import LanguageModel
from trainer.logprobs import Head, likeliest, target_logprobs
from trainer.memory import Footprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The datums ``rows`` (indices in the operation) that are computed together; ``tree`` lays out what they share."""

    rows: tuple[int, ...]
    tree: decoder.MicroBatch | None


class Passes:
    """Plans operations and computes log-probabilities of their targets, inside ``active``.

    ``footprint`` says how much is computed at once, and may be replaced between operations; ``lean`` False always
    takes the plain way. ``exact_head`` computes logits in float32, whatever ``dtype`` the layers compute in.
    """

    def __init__(
        self,
        model: LanguageModel,
        bank: AdapterBank,
        *,
        dtype: torch.dtype,
        footprint: Footprint,
        lean: bool = True,
        exact_head: bool = False,
    ) -> None:
        self._model = model
        self._bank = bank
        self.dtype = dtype
        self.head_dtype = torch.float32 if exact_head else dtype
        self.footprint = footprint
        self._exact_weight: Tensor | None = None
        settings = decoder.DecoderSettings(
            plan=_plan_settings(footprint),
            activation_bytes=footprint.activation_bytes,
            head_dtype=self.head_dtype,
        )
        self._decoder = model.decoder(dtype, settings) if lean else None

    def lean(self, data: Sequence[Datum]) -> bool:
        """Whether an operation takes the lean decoder. That knows one temperature per operation."""
        return self._decoder is not None and not any("temperature" in datum.loss_fn_inputs for datum in data)

    @contextmanager
    def active(self, adapter: str | None, data: Sequence[Datum], *, train: bool) -> Iterator[None]:
        """Compute an operation inside the block. The lean way leaves the base module alone."""
        with torch.set_grad_enabled(train), nullcontext() if self.lean(data) else self._bank.active(adapter):
            yield

    def check(self, adapter: str, data: Sequence[Datum]) -> None:
        """Refuse an operation that needs more memory than an operation may have. Raises Invalid."""
        self.footprint.check(data, self._trained_bytes(adapter), lean=self.lean(data))

    def shares(self, data: Sequence[Datum]) -> Iterator[Share]:
        """Split an operation, one share after the other; every datum is in exactly one."""
        if self._decoder is None or not self.lean(data):
            for rows in plan([datum.length for datum in data], self.footprint.micro_batch_tokens):
                yield Share(rows=rows, tree=None)
            return
        tokens = [np.frombuffer(datum.model_input.data, "<i8") for datum in data]
        targets = [datum.loss_fn_inputs["target_tokens"].size for datum in data]
        for tree in self._decoder.plan_each(tokens, targets, _plan_settings(self.footprint)):
            yield Share(rows=tree.datums, tree=tree)

    def needs(self, adapter: str, share: Share, batch: MicroBatch) -> int:
        """Return a bound for the memory that computing ``share`` takes, in bytes."""
        longest, targets = max(batch.lengths), sum(math.prod(shape) for shape in batch.shapes)
        trained_bytes = self._trained_bytes(adapter)
        if share.tree is None:
            return self.footprint.plain(batch.tokens_BT.numel(), longest, targets, trained_bytes)
        return self.footprint.lean(len(share.tree.tokens), longest, targets, trained_bytes)

    def logprobs(
        self,
        adapter: str | None,
        batch: MicroBatch,
        tree: decoder.MicroBatch | None,
        *,
        temperature: float = 1.0,
        trained_Q: Tensor | None = None,
        served: torch.dtype | None = None,
    ) -> Tensor:
        """Return the log-probabilities of all targets of ``batch`` ``[Q]`` under ``adapter``, or (None) the base.

        ``trained_Q`` marks the targets that may receive a gradient; None: all. ``served``: as engines of that dtype
        compute, where the lean decoder takes the batch; the plain way always does.
        """
        if self._decoder is None or tree is None:
            return self._plain(adapter, batch)
        masters = {} if adapter is None else self._bank.tensors(adapter)
        needed = None if trained_Q is None else [_rows(part) for part in batch.split(trained_Q)]
        parts = self._decoder.micro_batch(
            tree,
            batch.target_tables(),
            masters,
            self._bank.scale(adapter),
            need_grad_positions=needed,
            temperature=temperature,
            served=served,
        )
        return torch.cat([part.flatten() for part in parts])

    def likeliest(self, adapter: str | None, tokens_T: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the ``count`` likeliest tokens at each position of a sequence, and their log-probabilities.

        Both are ``[T, count]``. Takes the plain way: the lean decoder gathers targets that are known beforehand.
        """
        with torch.no_grad(), self._bank.active(adapter):
            return likeliest(self._model.hidden(tokens_T[None])[0], self._head(adapter), count)

    def score(
        self,
        adapter: str | None,
        sequences: Sequence[Sequence[int]],
        device: torch.device,
        served: torch.dtype | None = None,
    ) -> list[Tensor]:
        """Return, for every sequence, the log-probability of each of its tokens but the first (``served``: above)."""
        data = [
            Datum(
                model_input=TensorData.ints(sequence[:-1]),
                loss_fn_inputs={"target_tokens": TensorData.ints(sequence[1:])},
            )
            for sequence in sequences
        ]
        found: dict[int, Tensor] = {}
        with self.active(adapter, data, train=False):
            for share in self.shares(data):
                batch = assemble(data, share.rows, device)
                values = batch.split(self.logprobs(adapter, batch, share.tree, served=served))
                found.update(zip(share.rows, values, strict=True))
        return [found[index] for index in range(len(data))]

    def _trained_bytes(self, adapter: str) -> int:
        return sum(4 * master.numel() for master in self._bank.tensors(adapter).values())

    def _plain(self, adapter: str | None, batch: MicroBatch) -> Tensor:
        checkpoint = torch.is_grad_enabled() and self.footprint.checkpoints(batch.tokens_BT.numel())
        hidden_PH = self._model.hidden(batch.tokens_BT, checkpoint=checkpoint)[batch.real_BT]
        logprobs = target_logprobs(hidden_PH, batch.targets, self._head(adapter), batch.temperature_P)
        return logprobs if batch.real_PK is None else logprobs[batch.real_PK]

    def _head(self, adapter: str | None) -> Head:
        """Return the unembedding in the dtype that computes it; another one than the weight's is copied once."""
        head = self._bank.head(adapter)
        if head.weight_VH.dtype == self.head_dtype:
            return head
        if self._exact_weight is None:
            self._exact_weight = head.weight_VH.to(self.head_dtype)
        bias = None if head.bias_V is None else head.bias_V.to(self.head_dtype)
        return replace(head, weight_VH=self._exact_weight, bias_V=bias)


def _rows(trained: Tensor) -> Tensor:
    """Return bool ``[N]`` of ``[N]`` or ``[N, K]``: a position is needed when any of its targets is."""
    return trained if trained.dim() == 1 else trained.any(dim=1)


def _plan_settings(footprint: Footprint) -> decoder.PlanSettings:
    return decoder.PlanSettings(max_tokens=footprint.micro_batch_tokens, max_targets=footprint.targets)
