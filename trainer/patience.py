"""Waiting for what may come back: a database, an object store, a disk."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from gateway.core.errors import Unavailable

T = TypeVar("T")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


class Patience:
    """Repeats what is unavailable for as long as the process is wanted: ``stopping`` ends it."""

    def __init__(self, stopping: asyncio.Event) -> None:
        self._stopping = stopping
        self._events = structlog.stdlib.get_logger("trainer")

    async def wait_for(self, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return what ``attempt`` returns; ``what`` is away meanwhile, the log says.

        Raises:
            Unavailable: it still is, and the process is to stop.
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await attempt()
            except Unavailable as error:
                if self._stopping.is_set():
                    raise
                self._events.warning(f"{what}_unavailable", reason=error.message, retry_in_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
