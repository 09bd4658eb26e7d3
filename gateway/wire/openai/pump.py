"""Reads an engine's stream in a task of its own, so that a client that leaves takes no count with it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from gateway.core.sampling import EngineAnswer

DRAIN_S = 10.0  # from the abort to the engine's last count; an engine that takes longer is hung up on


class Pump:
    """Chunks of one stream, each shown to ``observe`` as soon as it is read, whether or not anybody asks for it."""

    def __init__(
        self, upstream: AsyncIterator[EngineAnswer], stop: asyncio.Event, observe: Callable[[EngineAnswer], None]
    ) -> None:
        self._upstream = upstream
        self._stop = stop
        self._observe = observe
        self._chunks: asyncio.Queue[EngineAnswer | Exception | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._run(), name="pump")

    async def chunks(self) -> AsyncIterator[Any]:
        """Yield the chunks' documents.

        Raises:
            Whatever the engine's stream raised.
        """
        while (chunk := await self._chunks.get()) is not None:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk.document

    async def finish(self) -> None:
        """Tell the engine to stop and wait for its last count. Must not be cancelled."""
        self._stop.set()
        _, late = await asyncio.wait([self._task], timeout=DRAIN_S)
        for task in late:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        try:
            async for chunk in self._upstream:
                self._observe(chunk)
                self._chunks.put_nowait(chunk)
        except Exception as error:
            self._chunks.put_nowait(error)
        else:
            self._chunks.put_nowait(None)
