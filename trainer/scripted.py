"""A backend without torch whose loss falls: tests, demos, and machines with no room for a model.

It computes the scripted model of ``gateway.core.scripted``. A session's state is a hash over everything that was done
to it, so that recovery, isolation and fencing can be checked to the bit here too; its log-probabilities are those of
the scripted base times 0.9 per optimizer step.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gateway.core.adapter_files import WEIGHTS_NAME
from gateway.core.canary import Canary
from gateway.core.catalog import BaseModel
from gateway.core.codec import encode_payload
from gateway.core.custom_losses import CustomLoss
from gateway.core.errors import Invalid
from gateway.core.ids import SessionId, VersionId
from gateway.core.payloads import Forward, ForwardBackward, LossFn, OptimStep
from gateway.core.records import digest
from gateway.core.results import ForwardResult, OptimStepResult
from gateway.core.scores import Likeliest, ScoreRequest
from gateway.core.scripted import (
    BASE_FINGERPRINT,
    SCRIPTED_NAME,
    read_fingerprint,
    scripted_file,
    scripted_logprob,
    scripted_scores,
)
from gateway.core.sessions import ComputeRules, LoraConfig
from gateway.core.tensors import Datum, TensorData
from trainer import canary_tokens
from trainer.backend import CorruptState, Loaded
from trainer.memory import peak_bytes
from trainer.progress import Note, unnoted

_STATE_NAME = "state.json"
_MERGED_NAME = "config.json"
_DECAY = 0.9


@dataclass(slots=True, kw_only=True)
class _State:
    """``weights`` is a hash; ``window`` hashes the payloads since the last step, None when there are none."""

    weights: str
    step: int = 0
    window: str | None = None


_RANKED = range(256)  # the scripted engine's tokens are bytes


class ScriptedScorer:
    """``Scorer`` on hashes: what the scripted engine answers, over the temperature."""

    def __init__(self) -> None:
        self.fingerprints: dict[VersionId, str] = {}

    def attach(self, version_id: VersionId, lora: LoraConfig, directory: Path) -> None:
        self.fingerprints[version_id] = read_fingerprint(directory)

    def detach(self, version_id: VersionId) -> None:
        self.fingerprints.pop(version_id, None)

    def score(self, request: ScoreRequest) -> TensorData:
        fingerprint = BASE_FINGERPRINT if request.version_id is None else self.fingerprints[request.version_id]
        width = request.targets.size // request.tokens.size
        previous = [int(token) for token in request.tokens.values() for _ in range(width)]
        logprobs = [
            scripted_logprob(fingerprint, before, int(token)) / request.temperature
            for before, token in zip(previous, request.targets.values(), strict=True)
        ]
        return TensorData.floats(logprobs, request.targets.shape)

    def likeliest(self, request: ScoreRequest) -> Likeliest:
        fingerprint = BASE_FINGERPRINT if request.version_id is None else self.fingerprints[request.version_id]
        ranked = [
            sorted(((scripted_logprob(fingerprint, int(before), token), -token) for token in _RANKED), reverse=True)
            for before in request.tokens.values()
        ]
        best = [pair for row in ranked for pair in row[: request.likeliest]]
        shape = (request.tokens.size, request.likeliest)
        return Likeliest(
            tokens=TensorData.ints((-token for _, token in best), shape),
            logprobs=TensorData.floats((logprob for logprob, _ in best), shape),
        )


class ScriptedBackend:
    """``TrainingBackend`` on hashes."""

    def __init__(self, base: BaseModel) -> None:
        self._base = base
        self.scorer = ScriptedScorer()
        self._states: dict[SessionId, _State] = {}
        self.base_sha256 = _hash(base.name)

    @property
    def rules(self) -> ComputeRules:
        return ComputeRules(threads=1, micro_batch_tokens=1)

    @property
    def made_with(self) -> Mapping[str, str]:
        return {"backend": "scripted"}

    def open(self, session_id: SessionId, lora: LoraConfig, rules: ComputeRules | None = None) -> None:
        self._states[session_id] = _State(weights=_hash(json.dumps(asdict(lora), sort_keys=True)))

    def close(self, session_id: SessionId) -> None:
        self._states.pop(session_id, None)

    def write_snapshot(self, session_id: SessionId, directory: Path) -> None:
        _write(directory, self._states[session_id])

    def restore(
        self, session_id: SessionId, lora: LoraConfig, directory: Path, rules: ComputeRules | None = None
    ) -> None:
        self._states[session_id] = _read(directory)

    def check(self, session_id: SessionId, payload: Forward | ForwardBackward) -> None:
        pass

    def forward(self, session_id: SessionId, payload: Forward, note: Note = unnoted) -> ForwardResult:
        return self._compute(session_id, payload, note)

    def forward_backward(self, session_id: SessionId, payload: ForwardBackward, note: Note = unnoted) -> ForwardResult:
        result = self._compute(session_id, payload, note)
        state = self._states[session_id]
        state.window = _hash(state.window or "", digest(encode_payload(payload)))
        return result

    def optim_step(self, session_id: SessionId, payload: OptimStep) -> OptimStepResult:
        state = self._states[session_id]
        if state.window is None:
            raise Invalid(
                "optim_step needs a forward_backward since the last one: there is no gradient to step on",
                code="empty_window",
            )
        state.weights = _hash(state.weights, state.window, digest(encode_payload(payload)))
        state.window = None
        state.step += 1
        return OptimStepResult(
            optimizer_step=state.step,
            metrics={"grad_norm:mean": _DECAY**state.step, "learning_rate:mean": payload.learning_rate},
        )

    def discard_window(self, session_id: SessionId) -> bool:
        state = self._states[session_id]
        discarded, state.window = state.window is not None, None
        return discarded

    def load_state(self, session_id: SessionId, directory: Path, *, optimizer: bool) -> Loaded:
        saved = _read(directory)
        discarded = self.discard_window(session_id)
        self._states[session_id] = _State(weights=saved.weights, step=saved.step if optimizer else 0)
        return Loaded(optimizer_step=self._states[session_id].step, discarded_gradient=discarded)

    def load_adapter(self, session_id: SessionId, directory: Path) -> Loaded:
        discarded = self.discard_window(session_id)
        self._states[session_id] = _State(weights=read_fingerprint(directory))
        return Loaded(optimizer_step=0, discarded_gradient=discarded)

    def write_adapter(self, session_id: SessionId, directory: Path) -> Canary:
        return self._write_adapter(self._states[session_id].weights, directory)

    def write_imported(self, session_id: SessionId, source: Path, directory: Path) -> Canary:
        return self._write_adapter(hashlib.sha256((source / WEIGHTS_NAME).read_bytes()).hexdigest(), directory)

    def _write_adapter(self, fingerprint: str, directory: Path) -> Canary:
        (directory / SCRIPTED_NAME).write_bytes(scripted_file(fingerprint))
        tokens = canary_tokens.fixed(self._base.vocab_size, self._base.context_length)
        return Canary(
            tokens=tokens,
            logprobs=tuple(scripted_scores(fingerprint, sequence) for sequence in tokens),
            base_logprobs=tuple(scripted_scores(BASE_FINGERPRINT, sequence) for sequence in tokens),
        )

    def write_merged(self, session_id: SessionId, directory: Path) -> None:
        (directory / _MERGED_NAME).write_bytes(scripted_file(self._states[session_id].weights))

    def write_state(self, session_id: SessionId, directory: Path) -> None:
        state = self._states[session_id]
        _write(directory, _State(weights=state.weights, step=state.step))

    def peak_bytes(self) -> int:
        return peak_bytes()

    def optimizer_step(self, session_id: SessionId) -> int:
        return self._states[session_id].step

    def _compute(self, session_id: SessionId, payload: Forward | ForwardBackward, note: Note) -> ForwardResult:
        decay = _DECAY ** self._states[session_id].step
        outputs: list[dict[str, TensorData]] = []
        loss, trained = 0.0, 0
        for datum in payload.data:
            targets = datum.loss_fn_inputs["target_tokens"]
            previous = [int(token) for token in datum.model_input.values() for _ in range(targets.size // datum.length)]
            logprobs = [
                decay * scripted_logprob(BASE_FINGERPRINT, before, int(token))
                for before, token in zip(previous, targets.values(), strict=True)
            ]
            weights = _weights(datum, payload.loss_fn, len(logprobs))
            loss -= sum(weight * logprob for weight, logprob in zip(weights, logprobs, strict=True))
            trained += sum(weight != 0 for weight in weights)
            outputs.append({"logprobs": TensorData.floats(logprobs, targets.shape)})
            note(len(outputs), len(payload.data))
        tokens = sum(datum.length for datum in payload.data)
        return ForwardResult(
            outputs=tuple(outputs),
            metrics={"loss:sum": loss, "tokens:sum": float(tokens), "loss_tokens:sum": float(trained)},
        )


def _weights(datum: Datum, loss_fn: LossFn | CustomLoss, targets: int) -> list[float]:
    """Return what each target weighs in the loss; a custom loss is taken for the negative log-likelihood."""
    if isinstance(loss_fn, CustomLoss):
        return [1.0] * targets
    inputs = datum.loss_fn_inputs
    weights = [float(value) for value in inputs["weights"].values()] if "weights" in inputs else [1.0] * datum.length
    if loss_fn is LossFn.CROSS_ENTROPY:
        return weights
    return [weight * float(advantage) for weight, advantage in zip(weights, inputs["advantages"].values(), strict=True)]


def _hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _write(directory: Path, state: _State) -> None:
    (directory / _STATE_NAME).write_text(json.dumps(asdict(state), sort_keys=True))


def _read(directory: Path) -> _State:
    try:
        record: dict[str, Any] = json.loads((directory / _STATE_NAME).read_bytes())
        return _State(**record)
    except (FileNotFoundError, ValueError, TypeError) as error:
        raise CorruptState(f"session state cannot be read: {error}") from error
