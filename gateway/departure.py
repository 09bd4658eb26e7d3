"""The gateway is about to stop: whoever waits is told at once."""

import asyncio
from collections.abc import Callable


class Departure:
    """Known to the server, which hears the signal, and to what waits. ``leave`` may be called from a signal handler."""

    def __init__(self) -> None:
        self._told: list[Callable[[], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def tell(self, *leave: Callable[[], None]) -> None:
        """Call these when the gateway leaves, in this event loop."""
        self._loop = asyncio.get_running_loop()
        self._told += leave

    def leave(self) -> None:
        for told in self._told:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(told)
