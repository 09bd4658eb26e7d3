"""Work that has to be done though nobody may wait for it: what a call held is given back, what it used is recorded."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import anyio
import structlog

from gateway.core.errors import Unavailable

RETRY_S = 1.0
Work = Callable[[], Coroutine[Any, Any, None]]

_owed: set[asyncio.Task[None]] = set()  # the event loop itself only remembers tasks weakly
_log = structlog.stdlib.get_logger("gateway.metering")


async def to_its_end(work: Work) -> None:
    """Do ``work``, also when the caller's scope or task is cancelled meanwhile. While the database is away it is tried
    again, for as long as this process lives.

    Raises:
        Unavailable: it is not done yet.
    """
    running = asyncio.create_task(work())
    try:
        with anyio.CancelScope(shield=True):
            try:
                await asyncio.shield(running)
            except asyncio.CancelledError:
                await asyncio.wait([running])
                raise
    finally:
        if not running.cancelled() and isinstance(running.exception(), Unavailable):
            _log.warning("not_settled")
            owed = asyncio.create_task(_once_it_is_back(work), name="owed")
            _owed.add(owed)
            owed.add_done_callback(_owed.discard)


async def _once_it_is_back(work: Work) -> None:
    while True:
        await asyncio.sleep(RETRY_S)
        try:
            with suppress(Unavailable):
                await work()
                _log.info("settled_later")
                return
        except Exception:  # the edge of a background task: a defect of ours, or the database was closed for good
            _log.exception("never_settled")
            return
