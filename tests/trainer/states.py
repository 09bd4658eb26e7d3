"""Everything a session is, read out for comparison by bits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gateway.core.ids import SessionId
from trainer.peft_backend import PeftBackend


@dataclass(frozen=True, eq=False)
class Bits:
    """Weights, moments and window in one list, and the step count. Equal when every bit is."""

    tensors: list[Tensor]
    step: int
    windowed: bool

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Bits)
            and (self.step, self.windowed) == (other.step, other.windowed)
            and all(torch.equal(ours, theirs) for ours, theirs in zip(self.tensors, other.tensors, strict=True))
        )


def state_of(backend: PeftBackend, session: SessionId) -> Bits:
    state = backend.state(session)
    window = list(state.window or ())
    tensors = [*state.weights.values(), *state.moments.first, *state.moments.second, *window]
    return Bits([tensor.detach().cpu().clone() for tensor in tensors], state.moments.step, state.window is not None)


def weights(backend: PeftBackend, session: SessionId) -> Tensor:
    """All masters, flattened into one vector."""
    return torch.cat([tensor.detach().cpu().flatten() for tensor in backend.state(session).weights.values()])


def gradients(backend: PeftBackend, session: SessionId) -> Tensor:
    """The accumulated gradient, flattened into one vector."""
    window = backend.state(session).window
    assert window is not None
    return torch.cat([tensor.cpu().flatten() for tensor in window])
