"""Clients that leave before their answer: what an engine computes for nobody is stopped.

A call with an Idempotency-Key runs to its end all the same: its client may only have lost patience, and comes back for
the answer.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

T = TypeVar("T")


async def unless_gone(request: Request, work: Coroutine[Any, Any, T], *, wanted_later: bool) -> T:
    """Return what ``work`` returns; cancel it when the client leaves first, unless it is ``wanted_later``.

    Raises:
        ClientDisconnect: the client left.
    """
    if wanted_later:
        return await work
    computing = asyncio.create_task(work)
    leaving = asyncio.create_task(_departure(request))
    try:
        await asyncio.wait({computing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not computing.done():
            raise ClientDisconnect
        return computing.result()
    finally:
        for task in (computing, leaving):
            task.cancel()
        await asyncio.gather(computing, leaving, return_exceptions=True)


async def _departure(request: Request) -> None:
    """Return when the client is gone. The body has been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
