"""The sessions in memory: the most recently used ones on the device, the others in the host's memory.

A session's masters live in the adapter bank while it is on the device. Moving it there and back copies float32 tensors
and changes no bit. On a CPU both are the same memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gateway.core.ids import SessionId
from gateway.core.sessions import LoraConfig
from trainer.adapters import AdapterBank
from trainer.optim import Moments
from trainer.snapshots import State


@dataclass(slots=True, kw_only=True)
class Tenant:
    """A session on the device, beside its masters.

    ``window`` is the gradient accumulated since the last optimizer step, float32 and parallel to the masters. None:
    nothing was accumulated, which is not the same as a gradient of zeros. ``recent`` are the token sequences that the
    next canary is taken from; they are part of the state so that a recovered session stages equal bytes.
    """

    lora: LoraConfig
    moments: Moments
    window: list[Tensor] | None = None
    recent: tuple[tuple[int, ...], ...] = field(default=())


class Tenants:
    """All sessions in memory, at most ``max_on_device`` of them on the device."""

    def __init__(self, bank: AdapterBank, device: torch.device, *, max_on_device: int) -> None:
        self._bank = bank
        self._device = device
        self._max_on_device = max_on_device
        self._here: dict[SessionId, Tenant] = {}  # least recently used first
        self._host: dict[SessionId, State] = {}

    @property
    def on_device(self) -> int:
        """How many sessions the device holds."""
        return len(self._here)

    def open(self, session_id: SessionId, lora: LoraConfig) -> None:
        """Start a session whose state depends on ``lora`` alone. Raises Invalid."""
        self._bank.attach(session_id, lora)
        self._here[session_id] = Tenant(lora=lora, moments=Moments.zeros(self.masters(session_id)))
        self._make_room()

    def place(self, session_id: SessionId, state: State) -> None:
        """Bring a session to the device as it was. Where it waits on the host, it stays until all of it is there."""
        tenant = Tenant(
            lora=state.lora,
            moments=moments_on(self._device, state.moments),
            window=None if state.window is None else _on(self._device, state.window),
            recent=state.recent,
        )
        self._bank.attach(session_id, state.lora, state.weights)
        self._here[session_id] = tenant
        self._host.pop(session_id, None)
        self._make_room()

    def use(self, session_id: SessionId) -> Tenant:
        """Return a session, on the device and the most recently used. Raises KeyError."""
        if (parked := self._host.get(session_id)) is not None:
            self.place(session_id, parked)
        tenant = self._here.pop(session_id)
        self._here[session_id] = tenant
        self._make_room()
        return tenant

    def close(self, session_id: SessionId) -> None:
        """Forget a session, if it is known."""
        self._host.pop(session_id, None)
        if self._here.pop(session_id, None) is not None:
            self._bank.detach(session_id)

    def masters(self, session_id: SessionId) -> list[nn.Parameter]:
        """Return the masters of a session on the device."""
        return list(self._bank.tensors(session_id).values())

    def state(self, session_id: SessionId) -> State:
        """Return everything a session is, by reference: valid until its next operation."""
        if (parked := self._host.get(session_id)) is not None:
            return parked
        tenant = self._here[session_id]
        return State(
            lora=tenant.lora,
            weights=self._bank.tensors(session_id),
            moments=tenant.moments,
            window=tenant.window,
            recent=tenant.recent,
        )

    def _make_room(self) -> None:
        while len(self._here) > self._max_on_device:
            session_id, tenant = next(iter(self._here.items()))
            host = torch.device("cpu")
            names = self._bank.tensors(session_id)
            weights = dict(zip(names, _on(host, [master.detach() for master in names.values()]), strict=True))
            self._host[session_id] = State(
                lora=tenant.lora,
                weights=weights,
                moments=moments_on(host, tenant.moments),
                window=None if tenant.window is None else _on(host, tenant.window),
                recent=tenant.recent,
            )
            del self._here[session_id]
            self._bank.detach(session_id)


def moments_on(device: torch.device, moments: Moments) -> Moments:
    return Moments(first=_on(device, moments.first), second=_on(device, moments.second), step=moments.step)


def _on(device: torch.device, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.to(device) for tensor in tensors]
