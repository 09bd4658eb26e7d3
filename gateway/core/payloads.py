"""The closed union of work a session can be asked to do.

A payload is complete: names are resolved, defaults filled in, versions looked up. What the trainer replays after
a crash is exactly this. ``codec.py`` gives its canonical bytes; equal payloads have equal digests.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gateway.core.custom_losses import CustomLoss
from gateway.core.ids import VersionId
from gateway.core.tensors import Datum
from gateway.core.versions import Labels


class LossFn(StrEnum):
    """Losses the trainer computes. Every one is a plain sum over positions and datums."""

    CROSS_ENTROPY = "cross_entropy"
    IMPORTANCE_SAMPLING = "importance_sampling"
    PPO = "ppo"
    CISPO = "cispo"
    DRO = "dro"
    GSPO = "gspo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Log-probabilities and loss of ``data`` under the current weights; touches no gradient."""

    data: tuple[Datum, ...]
    loss_fn: LossFn | CustomLoss
    loss_fn_config: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackward:
    """As ``Forward``, and adds the gradient of the summed loss to the session's accumulator."""

    data: tuple[Datum, ...]
    loss_fn: LossFn | CustomLoss
    loss_fn_config: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStep:
    """One AdamW step on the accumulated gradient, which it clears.

    ``weight_decay`` is decoupled; ``grad_clip_norm`` is a global norm, 0 means no clipping. The learning rate of the B
    matrices is ``learning_rate * lora_plus_lr_ratio`` (LoRA+).
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    lora_plus_lr_ratio: float = 1.0


class Publish(StrEnum):
    """When a saved adapter goes through the publish gate."""

    EAGER = "eager"  # now: the operation completes when the engines serve it
    LAZY = "lazy"  # at first use: the operation completes when it is staged


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """An adapter that somebody uploaded, checked as far as that goes without its base model."""

    location: str
    manifest_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWeights:
    """Save the current adapter, or (``merge``) a full deployable model, as a version of ``group``.

    With ``source`` the version is made of those weights, and the session's own are left out of it.
    """

    group: str
    merge: bool = False
    source: Upload | None = None
    publish: Publish = Publish.EAGER
    labels: Labels = field(default_factory=Labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveState:
    """Save weights, moments and counters as a resumable version of ``group``."""

    group: str
    labels: Labels = field(default_factory=Labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadState:
    """Replace weights by those of ``version_id``; with ``optimizer`` its moments and step too, else fresh ones.

    An adapter has none of the latter, and its weights were cast to the engines' type.
    """

    version_id: VersionId
    optimizer: bool


Payload = Forward | ForwardBackward | OptimStep | SaveWeights | SaveState | LoadState


class OperationKind(StrEnum):
    """The glossary's name of each payload."""

    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE_WEIGHTS = "save_weights"
    SAVE_STATE = "save_state"
    LOAD_STATE = "load_state"


PAYLOAD_KINDS: Mapping[type[Payload], OperationKind] = {
    Forward: OperationKind.FORWARD,
    ForwardBackward: OperationKind.FORWARD_BACKWARD,
    OptimStep: OperationKind.OPTIM_STEP,
    SaveWeights: OperationKind.SAVE_WEIGHTS,
    SaveState: OperationKind.SAVE_STATE,
    LoadState: OperationKind.LOAD_STATE,
}


def billed_tokens(payload: Payload) -> int | None:
    """Return the model-input tokens that ``payload`` is billed for once it is completed; None: it is not metered."""
    match payload:
        case Forward() | ForwardBackward():
            return sum(datum.length for datum in payload.data)
        case _:
            return None


def kind_of(payload: Payload) -> OperationKind:
    return PAYLOAD_KINDS[type(payload)]
