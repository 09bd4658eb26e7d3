"""The real scorer: exported adapters on the backend's own base model, forward only.

An adapter is scored as it was exported: its tensors in the engine's dtype, widened to float32. A request is computed by
itself, so its numbers depend on nothing else that is asked at the time.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from gateway.core.errors import Invalid
from gateway.core.ids import VersionId
from gateway.core.scores import Likeliest, ScoreRequest
from gateway.core.sessions import LoraConfig
from gateway.core.tensors import Datum, TensorData
from trainer.adapters import AdapterBank
from trainer.batching import assemble, to_data, to_tensor
from trainer.passes import Passes
from trainer.stage import read_adapter


class PeftScorer:
    """``Scorer`` on the bank and the passes of a backend. Versions and sessions never share an id."""

    def __init__(self, bank: AdapterBank, passes: Passes, device: torch.device) -> None:
        self._bank = bank
        self._passes = passes
        self._device = device
        self._attached: set[VersionId] = set()

    def attach(self, version_id: VersionId, lora: LoraConfig, directory: Path) -> None:
        adapter = read_adapter(directory)
        exported = replace(lora, rank=adapter.rank, alpha=float(adapter.alpha), use_rslora=False)
        self._bank.attach(version_id, exported, adapter.tensors)
        self._attached.add(version_id)

    def detach(self, version_id: VersionId) -> None:
        if version_id in self._attached:
            self._attached.remove(version_id)
            self._bank.detach(version_id)

    def score(self, request: ScoreRequest) -> TensorData:
        """As the protocol says; [N, K] targets cost little more than [N]: positions go through the head once.

        Raises:
            Invalid: ``memory_limit_exceeded``.
        """
        adapter, data = request.version_id, [_datum(request)]
        self._check(data, lean=self._passes.lean(data))
        with self._passes.active(adapter, data, train=False):
            (share,) = self._passes.shares(data)
            batch = assemble(data, share.rows, self._device, {"temperature": request.temperature})
            logprobs = self._passes.logprobs(adapter, batch, share.tree, temperature=request.temperature)
            return to_data(batch.split(logprobs)[0])

    def likeliest(self, request: ScoreRequest) -> Likeliest:
        """As the protocol says.

        Raises:
            Invalid: ``memory_limit_exceeded``.
        """
        self._check([_datum(request)], lean=False)
        tokens_T = to_tensor(request.tokens).to(self._device)
        tokens, logprobs = self._passes.likeliest(request.version_id, tokens_T, request.likeliest)
        ids = cast("list[int]", tokens.flatten().tolist())
        return Likeliest(tokens=TensorData.ints(ids, tuple(tokens.shape)), logprobs=to_data(logprobs))

    def _check(self, data: Sequence[Datum], *, lean: bool) -> None:
        try:
            self._passes.footprint.check(data, 0, lean=lean)
        except Invalid as error:
            message = error.message.replace("data[0]", "the prompt")
            details = {name: value for name, value in error.details.items() if name != "datum"}
            raise Invalid(message, code=error.code, field="prompt", details=details) from error


def _datum(request: ScoreRequest) -> Datum:
    return Datum(model_input=request.tokens, loss_fn_inputs={"target_tokens": request.targets})
