"""Waiting for operations and scores: the only long-poll logic.

All waiters of a process for one kind of work share a loop: a wake-up triggers one query for everything waited for. No
database connection is held while nothing happens.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from gateway.core.errors import Unavailable
from gateway.core.ids import ProjectId
from gateway.core.ports import Database, UnitOfWork, Wakeups

MAX_WAIT_S = 60.0
_RECHECK_S = 5.0  # a lost wake-up costs at most this
_log = logging.getLogger("gateway.futures")


class Awaited(Protocol):
    """What can be waited for: it becomes final, once."""

    @property
    def final(self) -> bool: ...


Id = TypeVar("Id", bound=str)
Work_co = TypeVar("Work_co", bound=Awaited, covariant=True)


class AwaitedStore(Protocol[Id, Work_co]):
    """Where it is recorded."""

    async def get(self, project_id: ProjectId, id: Id, /) -> Work_co: ...

    async def final_among(self, ids: Sequence[Id]) -> Sequence[Id]: ...


class Futures(Generic[Id, Work_co]):
    """Long polls on one store. Use as an async context manager: it owns the shared loop."""

    def __init__(
        self, database: Database, wakeups: Wakeups, store: Callable[[UnitOfWork], AwaitedStore[Id, Work_co]]
    ) -> None:
        self._database = database
        self._wakeups = wakeups
        self._store = store
        self._waiters: defaultdict[Id, set[asyncio.Future[None]]] = defaultdict(set)
        self._added = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._leaving = False

    @property
    def waiting(self) -> int:
        """How many wait."""
        return sum(len(waiters) for waiters in self._waiters.values())

    def leave(self) -> None:
        """Let everybody who waits, now or later, be answered at once with the work as it stands."""
        self._leaving = True
        for waiters in self._waiters.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.create_task(self._watch(), name="futures")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)

    async def wait(self, project_id: ProjectId, id: Id, timeout_s: float) -> Work_co:
        """Return the work as soon as it is final, or as it stands after ``timeout_s`` (at most 60).

        Raises:
            NotFound: no such thing in the project.
        """
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[id].add(waiter)
        try:
            found = await self._read(project_id, id)
            if found.final or timeout_s <= 0 or self._leaving:
                return found
            self._added.set()
            await asyncio.wait([waiter], timeout=min(timeout_s, MAX_WAIT_S))
            return await self._read(project_id, id)
        finally:
            waiters = self._waiters[id]
            waiters.discard(waiter)
            if not waiters:
                del self._waiters[id]

    async def _read(self, project_id: ProjectId, id: Id) -> Work_co:
        async with self._database.read() as unit:
            return await self._store(unit).get(project_id, id)

    async def _watch(self) -> None:
        seen = 0
        while True:
            if not self._waiters:
                self._added.clear()
                await self._added.wait()
            try:
                async with self._database.read() as unit:
                    final = await self._store(unit).final_among(list(self._waiters))
            except Unavailable:
                final = ()  # the next look is at most _RECHECK_S away
            except Exception:  # the edge of a background task: everybody who waits, now and later, waits for this loop
                _log.exception("look_failed")
                final = ()
            for id in final:
                for waiter in self._waiters.get(id, ()):
                    if not waiter.done():
                        waiter.set_result(None)
            seen = await self._wakeups.wait(seen, _RECHECK_S)
