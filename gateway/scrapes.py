"""Fills in, when somebody asks for ``/metrics``, what the database and the engines know."""

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta

from sqlalchemy import Connection

from billing.statements import consumed_after, newest_posting
from gateway.core.clock import Clock
from gateway.core.errors import Unavailable
from gateway.engines.pool import EnginePool
from gateway.metrics import Metrics
from gateway.store import SqlDatabase
from gateway.store.measures import Finished, Live, Queue, finished, live, queues

FRESH_S = 1.0
SLACK = timedelta(seconds=2)  # a transaction commits later than the moment that it writes down


class Scrapes:
    """One look per second at most, however many ask. While the database is away the old figures stand."""

    def __init__(
        self, database: SqlDatabase, engines: EnginePool, metrics: Metrics, clock: Clock, waiting: Callable[[], int]
    ) -> None:
        self._database = database
        self._engines = engines
        self._metrics = metrics
        self._clock = clock
        self._waiting = waiting
        self._looking = asyncio.Lock()
        self._looked_at = -FRESH_S
        self._finished_until = clock.now() - SLACK
        self._posted: int | None = None

    async def refresh(self) -> None:
        self._metrics.waiting.set(self._waiting())
        self._metrics.tasks.set(len(asyncio.all_tasks()))
        async with self._looking:
            if time.monotonic() - self._looked_at < FRESH_S:
                return
            self._looked_at = time.monotonic()
            for slots in self._engines.slots():
                self._metrics.engine(slots)
            try:
                await self._read()
            except Unavailable:
                self._metrics.database_up.set(0)

    async def _read(self) -> None:
        now, after = self._clock.now(), self._finished_until
        until = now - SLACK

        def look(connection: Connection) -> tuple[list[Queue], list[Live], list[Finished], int]:
            done = finished(connection, after=after, until=until)
            return list(queues(connection)), list(live(connection)), list(done), newest_posting(connection)

        waiting, alive, done, newest = await self._database.look(look)
        self._finished_until = until
        self._metrics.database_up.set(1)
        self._metrics.queues(waiting, now)
        self._metrics.sessions(alive)
        for operation in done:
            self._metrics.finished(operation)
        if self._posted is not None and newest > self._posted:
            posted = self._posted
            lines = await self._database.look(lambda connection: consumed_after(connection, posted, newest))
            for base_model, meter, quantity in lines:
                self._metrics.tokens.labels(base_model, meter).inc(quantity)
        self._posted = newest
