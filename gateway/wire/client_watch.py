"""Clients that leave before their answer: what an engine computes for nobody is stopped.

A call with an Idempotency-Key runs to its end all the same: its client may only have lost patience, and comes back for
the answer.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, Request


class ClientWatch:
    """Watches one client. The request's body has been read before."""

    def __init__(self, request: Request) -> None:
        self._request = request

    @asynccontextmanager
    async def watched(self, *, wanted_later: bool) -> AsyncGenerator[asyncio.Event | None]:
        """Yield what is set when the client leaves; None for an answer that is ``wanted_later``."""
        if wanted_later:
            yield None
            return
        left = asyncio.Event()
        watching = asyncio.create_task(self._watch(left), name="client-watch")
        try:
            yield left
        finally:
            watching.cancel()

    async def _watch(self, left: asyncio.Event) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        left.set()


async def _client_watch(request: Request) -> ClientWatch:
    return ClientWatch(request)


ClientWatchDep = Annotated[ClientWatch, Depends(_client_watch)]
