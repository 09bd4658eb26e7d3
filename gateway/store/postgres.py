"""PostgreSQL: a transaction per unit of work, on a pool."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import structlog
from sqlalchemy import URL, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from gateway.core.clock import Clock, SystemClock
from gateway.store.transaction import Transaction
from gateway.store.trips import Work
from gateway.store.unfit import weak
from gateway.store.wakeups import CHANNEL, PostgresWakeups

T = TypeVar("T")
CONNECTIONS = 10  # per process; a default server allows 100
OVERFLOW = 5
ABANDONED_S = 10.0  # the server ends a transaction then whose process says nothing: it may be stopped, with its locks
_RETRY_S = 0.5
_REQUIRED = {"fsync": {"on"}, "full_page_writes": {"on"}, "synchronous_commit": {"on", "remote_apply", "local"}}


class PostgresTransactions:
    """Reads are repeatable and read only; writes are read committed and lock the rows they decide on."""

    def __init__(self, engine: AsyncEngine, wakeups: PostgresWakeups, *, clock: Clock, blob_dir: Path) -> None:
        self._engine = engine
        self._clock = clock
        self._blob_dir = blob_dir
        self._inside: set[asyncio.Task[object] | None] = set()
        self._reading = engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        self.wakeups = wakeups
        self.commits = 0

    @asynccontextmanager
    async def read(self) -> AsyncIterator[Transaction]:
        async with self._reading.connect() as connection:
            transaction = self._transaction(connection, read_only=True)
            try:
                yield transaction
            finally:
                await transaction.settle()

    @asynccontextmanager
    async def write(self, *, durable: bool = True) -> AsyncIterator[Transaction]:
        caller = asyncio.current_task()
        if caller in self._inside:
            raise RuntimeError("a unit of work was opened inside another one: they could wait for each other")
        self._inside.add(caller)
        try:
            async with self._engine.connect() as connection:
                transaction = self._transaction(connection, read_only=False)
                if not durable:
                    await connection.exec_driver_sql("SET LOCAL synchronous_commit = off")
                try:
                    yield transaction
                finally:
                    await transaction.settle()
                if transaction.announced:
                    await connection.exec_driver_sql(f"NOTIFY {CHANNEL}")
                await connection.commit()
                self.commits += durable
        finally:
            self._inside.discard(caller)

    async def ask(self, work: Work[T]) -> T:
        async with self.read() as transaction:
            return await work(transaction)

    async def glance(self, work: Work[T]) -> T:
        return await self.ask(work)

    async def apply(self, work: Work[T], *, durable: bool = True) -> T:
        async with self.write(durable=durable) as transaction:
            return await work(transaction)

    async def jot(self, work: Work[T]) -> T:
        return await self.apply(work, durable=False)

    def _transaction(self, connection: AsyncConnection, *, read_only: bool) -> Transaction:
        return Transaction(connection, postgres=True, clock=self._clock, blob_dir=self._blob_dir, read_only=read_only)


@asynccontextmanager
async def open_postgres(
    url: URL, *, blob_dir: Path, clock: Clock, wait_s: float, allow_weak: bool
) -> AsyncIterator[PostgresTransactions]:
    """Connect to the server, trying for ``wait_s`` seconds.

    Raises:
        OperationalError: it is not up, or refuses us.
        WeakDurability: the server may lose acknowledged commits.
    """
    engine = create_async_engine(
        url,
        isolation_level="READ COMMITTED",
        pool_size=CONNECTIONS,
        max_overflow=OVERFLOW,
        pool_timeout=30,
        pool_pre_ping=True,  # the server may have restarted
        execution_options={"preserve_rowcount": True},
    )
    event.listen(engine.sync_engine, "connect", _bound_silence)
    _, arguments = engine.dialect.create_connect_args(url)
    wakeups = PostgresWakeups(arguments)
    try:
        await _until_up(engine, wait_s)
        await _check_durability(engine, allow_weak=allow_weak)
        if isinstance(clock, SystemClock):
            clock.set(await _time(engine))
        yield PostgresTransactions(engine, wakeups, clock=clock, blob_dir=blob_dir)
    finally:
        await wakeups.close()
        await engine.dispose()


def _bound_silence(connection: DBAPIConnection, _record: ConnectionPoolEntry) -> None:
    cursor = connection.cursor()
    cursor.execute(f"SET idle_in_transaction_session_timeout = {ABANDONED_S * 1000:.0f}")
    cursor.close()
    connection.commit()


async def _until_up(engine: AsyncEngine, wait_s: float) -> None:
    loop, events = asyncio.get_running_loop(), structlog.stdlib.get_logger("gateway.store")
    deadline = loop.time() + wait_s
    while True:
        try:
            async with engine.connect():
                return
        except OperationalError as error:
            if loop.time() >= deadline:
                raise
            events.warning("database_not_up", reason=str(error.orig), retry_in_s=_RETRY_S)
        await asyncio.sleep(_RETRY_S)


async def _check_durability(engine: AsyncEngine, *, allow_weak: bool) -> None:
    async with engine.connect() as connection:
        for setting, strong in _REQUIRED.items():
            value = (await connection.exec_driver_sql(f"SHOW {setting}")).scalar_one()
            if value not in strong:
                weak(f"PostgreSQL runs with {setting}={value}; set it to on", allowed=allow_weak)


async def _time(engine: AsyncEngine) -> datetime:
    async with engine.connect() as connection:
        return (await connection.exec_driver_sql("SELECT clock_timestamp()")).scalar_one()
