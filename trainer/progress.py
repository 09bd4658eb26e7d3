"""How far a long operation has come: noted by the thread that computes, written to the log by the event loop."""

import asyncio
from collections.abc import Awaitable, Callable

from gateway.core.operations import Progress

WRITE_EVERY_S = 0.5
Note = Callable[[int, int], None]  # datums done, datums in all


def unnoted(done: int, total: int) -> None:
    """Note nothing: for calls that nobody watches, such as a replay."""


class Watch:
    """The last progress noted. ``note`` may be called from any thread; it only replaces one reference."""

    def __init__(self) -> None:
        self._latest: Progress | None = None

    def note(self, done: int, total: int) -> None:
        self._latest = Progress(done=done, total=total)

    async def write(
        self,
        out: Callable[[Progress], Awaitable[None]],
        ended: asyncio.Event,
        every_s: float = WRITE_EVERY_S,
    ) -> None:
        """Hand out what is new, at most once in ``every_s``, until ``ended``: a shorter operation costs no write."""
        written = None
        while not ended.is_set():
            try:
                await asyncio.wait_for(ended.wait(), every_s)
            except TimeoutError:
                latest = self._latest
                if latest is not None and latest != written:
                    await out(latest)
                    written = latest
