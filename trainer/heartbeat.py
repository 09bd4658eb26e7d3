"""Keeps leases and the trainer's sign of life fresh while a kernel runs in its own thread."""

import asyncio
from collections.abc import Mapping
from typing import Protocol

from gateway.core.ids import SessionId


class Leases(Protocol):
    """Whose leases are renewed, and who hears of lost ones."""

    def epochs(self) -> Mapping[SessionId, int]:
        """Return the epoch of every session held now."""
        ...

    def lost(self, session_id: SessionId, epoch: int) -> None:
        """The lease of that epoch is gone: somebody else has the session, or it ended."""
        ...


class Renewer(Protocol):
    """What extends leases."""

    async def renew(self) -> Mapping[SessionId, int]:
        """Extend all leases; return the epoch of every session still held."""
        ...


async def beat(renewer: Renewer, leases: Leases, *, every_s: float) -> None:
    """Renew for ever. A lease counts as lost only if it was held before the renewal that does not list it."""
    while True:
        before = dict(leases.epochs())
        held = await renewer.renew()
        for session_id, epoch in before.items():
            if held.get(session_id) != epoch:
                leases.lost(session_id, epoch)
        await asyncio.sleep(every_s)
