"""The two ways through the base model: the lean decoder where it is exact, plain transformers + PEFT elsewhere.

Which one computes an operation depends on the model and on that operation alone, so a replay takes the same way.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gateway.core.tensors import Datum
from trainer import decoder
from trainer.adapters import AdapterBank
from trainer.batching import MicroBatch, plan, to_tensor
from trainer.language_model import LanguageModel
from trainer.logprobs import target_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The datums ``rows`` (indices in the operation) that are computed together; ``tree`` lays out what they share."""

    rows: tuple[int, ...]
    tree: decoder.MicroBatch | None


class Passes:
    """Plans operations and computes log-probabilities of their targets. The adapter asked for must be the active one.

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

    def score(self, adapter: str | None, sequence: Sequence[int], device: torch.device) -> Tensor:
        """Return the log-probability of every token of ``sequence`` but the first."""
        tokens = torch.tensor([sequence], dtype=torch.int64, device=device)
        batch = MicroBatch(
            rows=(0,),
            lengths=(len(sequence) - 1,),
            tokens_BT=tokens[:, :-1],
            real_BT=torch.ones_like(tokens[:, :-1], dtype=torch.bool),
            targets=tokens[0, 1:],
            real_PK=None,
            inputs={},
            temperature_P=None,
            shapes=((len(sequence) - 1,),),
        )
        tree = None if self._decoder is None else self._decoder.plan([np.asarray(sequence[:-1], np.int64)])[0]
        return self.logprobs(adapter, batch, tree)

    def _plain(self, adapter: str | None, batch: MicroBatch) -> Tensor:
        hidden_PH = self._model.hidden(batch.tokens_BT)[batch.real_BT]
        logprobs = target_logprobs(hidden_PH, batch.targets, self._bank.head(adapter), batch.temperature_P)
        return logprobs if batch.real_PK is None else logprobs[batch.real_PK]


def _rows(trained: Tensor) -> Tensor:
    """Return bool ``[N]`` of ``[N]`` or ``[N, K]``: a position is needed when any of its targets is."""
    return trained if trained.dim() == 1 else trained.any(dim=1)
