"""Waiting for operations: the only long-poll logic.

All waiters of a process share one loop: a wake-up triggers one query for every operation waited for. No database
connection is held while nothing happens.
"""

import asyncio
from collections import defaultdict
from types import TracebackType
from typing import Self

from gateway.core.errors import Unavailable
from gateway.core.ids import OperationId, ProjectId
from gateway.core.operations import Operation
from gateway.core.ports import Database, Wakeups

MAX_WAIT_S = 60.0
_RECHECK_S = 5.0  # a lost wake-up costs at most this


class Futures:
    """Long polls on operations. Use as an async context manager: it owns the shared loop."""

    def __init__(self, database: Database, wakeups: Wakeups) -> None:
        self._database = database
        self._wakeups = wakeups
        self._waiters: defaultdict[OperationId, set[asyncio.Future[None]]] = defaultdict(set)
        self._added = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.create_task(self._watch(), name="futures")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)

    async def wait(self, project_id: ProjectId, operation_id: OperationId, timeout_s: float) -> Operation:
        """Return the operation as soon as it is final, or as it stands after ``timeout_s`` (at most 60).

        Raises:
            NotFound: no such operation in the project.
        """
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[operation_id].add(waiter)
        try:
            operation = await self._read(project_id, operation_id)
            if operation.final or timeout_s <= 0:
                return operation
            self._added.set()
            await asyncio.wait([waiter], timeout=min(timeout_s, MAX_WAIT_S))
            return await self._read(project_id, operation_id)
        finally:
            waiters = self._waiters[operation_id]
            waiters.discard(waiter)
            if not waiters:
                del self._waiters[operation_id]

    async def _read(self, project_id: ProjectId, operation_id: OperationId) -> Operation:
        async with self._database.read() as unit:
            return await unit.operations.get(project_id, operation_id)

    async def _watch(self) -> None:
        seen = 0
        while True:
            if not self._waiters:
                self._added.clear()
                await self._added.wait()
            try:
                async with self._database.read() as unit:
                    final = await unit.operations.final_among(list(self._waiters))
            except Unavailable:
                final = ()  # the next look is at most _RECHECK_S away
            for operation_id in final:
                for waiter in self._waiters.get(operation_id, ()):
                    if not waiter.done():
                        waiter.set_result(None)
            seen = await self._wakeups.wait(seen, _RECHECK_S)
