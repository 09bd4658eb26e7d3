"""The state of one resident session, beside its masters (which live in the adapter bank)."""

from dataclasses import dataclass, field

from torch import Tensor

from gateway.core.sessions import LoraConfig
from trainer.optim import Moments


@dataclass(slots=True, kw_only=True)
class Tenant:
    """``window`` is the gradient accumulated since the last optimizer step, float32 and parallel to the masters.

    None: nothing was accumulated, which is not the same as a gradient of zeros. ``recent`` are the token sequences
    that the next canary is taken from; they are part of the state so that a recovered session stages equal bytes.
    """

    lora: LoraConfig
    moments: Moments
    window: list[Tensor] | None = None
    recent: tuple[tuple[int, ...], ...] = field(default=())
