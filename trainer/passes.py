"""The two ways through the base model: the lean decoder where it is exact, plain transformers + PEFT elsewhere.

Which one computes an operation depends on the model and on that operation alone, so a replay takes the same way.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gateway.core.tensors import Datum, TensorData
from trainer import decoder
from trainer.adapters import AdapterBank
from trainer.batching import MicroBatch, assemble, plan, to_tensor
from trainer.language_model import LanguageModel
from trainer.logprobs import target_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The datums ``rows`` (indices in the operation) that are computed together; ``tree`` lays out what they share."""

    rows: tuple[int, ...]
    tree: decoder.MicroBatch | None


class Passes:
    """Plans operations and computes log-probabilities of their targets, inside ``active``.

    ``micro_batch_tokens`` bounds the tokens computed at once; ``lean`` False always takes the plain way.
    """

    def __init__(
        self,
        model: LanguageModel,
        bank: AdapterBank,
        *,
        dtype: torch.dtype,
        micro_batch_tokens: int,
        lean: bool = True,
    ) -> None:
        self._model = model
        self._bank = bank
        self._micro_batch_tokens = micro_batch_tokens
        settings = decoder.DecoderSettings(plan=decoder.PlanSettings(max_tokens=micro_batch_tokens))
        self._decoder = model.decoder(dtype, settings) if lean else None

    def shares(self, data: Sequence[Datum]) -> list[Share]:
        """Split an operation; every datum is in exactly one share.

        The decoder knows one temperature per operation, so per-datum temperatures take the plain way.
        """
        own_temperature = any("temperature" in datum.loss_fn_inputs for datum in data)
        if self._decoder is None or own_temperature:
            return [
                Share(rows=rows, tree=None) for rows in plan([datum.length for datum in data], self._micro_batch_tokens)
            ]
        return [
            Share(rows=tree.datums, tree=tree)
            for tree in self._decoder.plan([to_tensor(datum.model_input) for datum in data])
        ]

    def logprobs(
        self,
        adapter: str | None,
        batch: MicroBatch,
        tree: decoder.MicroBatch | None,
        *,
        temperature: float = 1.0,
        trained_Q: Tensor | None = None,
    ) -> Tensor:
        """Return the log-probabilities of all targets of ``batch`` ``[Q]`` under ``adapter``, or (None) the base.

        ``trained_Q`` marks the targets that may receive a gradient; None: all.
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
        )
        return torch.cat([part.flatten() for part in parts])

    def score(self, adapter: str | None, sequences: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
        """Return, for every sequence, the log-probability of each of its tokens but the first."""
        data = [
            Datum(
                model_input=TensorData.ints(sequence[:-1]),
                loss_fn_inputs={"target_tokens": TensorData.ints(sequence[1:])},
            )
            for sequence in sequences
        ]
        found: dict[int, Tensor] = {}
        shares = self.shares(data)
        with torch.no_grad(), self.active(adapter, shares):
            for share in shares:
                batch = assemble(data, share.rows, device)
                values = batch.split(self.logprobs(adapter, batch, share.tree))
                found.update(zip(share.rows, values, strict=True))
        return [found[index] for index in range(len(data))]

    @contextmanager
    def active(self, adapter: str | None, shares: Sequence[Share]) -> Iterator[None]:
        """Prepare the base module for an operation that takes the plain way; the lean way leaves it alone."""
        if all(share.tree is not None for share in shares):
            yield
            return
        with self._bank.active(adapter):
            yield

    def _plain(self, adapter: str | None, batch: MicroBatch) -> Tensor:
        hidden_PH = self._model.hidden(batch.tokens_BT)[batch.real_BT]
        logprobs = target_logprobs(hidden_PH, batch.targets, self._bank.head(adapter), batch.temperature_P)
        return logprobs if batch.real_PK is None else logprobs[batch.real_PK]


def _rows(trained: Tensor) -> Tensor:
    """Return bool ``[N]`` of ``[N]`` or ``[N, K]``: a position is needed when any of its targets is."""
    return trained if trained.dim() == 1 else trained.any(dim=1)
