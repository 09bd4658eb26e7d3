"""SQLite: WAL with full fsync, readers that never block, one group-committing writer per process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from gateway.core.clock import Clock
from gateway.store.durability import WeakDurability
from gateway.store.transaction import Transaction
from gateway.store.wakeups import SqliteWakeups
from gateway.store.writer import GroupWriter

READERS = 8
READ_BUSY_TIMEOUT_MS = 10_000


class SqliteTransactions:
    """Reads on a pool of connections, writes through the group writer."""

    def __init__(
        self, reader: AsyncEngine, writer: GroupWriter, wakeups: SqliteWakeups, *, clock: Clock, blob_dir: Path
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._clock = clock
        self._blob_dir = blob_dir
        self.wakeups = wakeups

    @property
    def commits(self) -> int:
        return self._writer.commits

    @asynccontextmanager
    async def read(self) -> AsyncIterator[Transaction]:
        async with self._reader.connect() as connection:
            await connection.exec_driver_sql("BEGIN")
            transaction = Transaction(connection, clock=self._clock, blob_dir=self._blob_dir, read_only=True)
            try:
                yield transaction
            finally:
                await transaction.settle()

    @asynccontextmanager
    async def write(self) -> AsyncIterator[Transaction]:
        async with self._writer.unit() as transaction:
            yield transaction


@asynccontextmanager
async def open_sqlite(url: URL, *, blob_dir: Path, clock: Clock) -> AsyncIterator[SqliteTransactions]:
    """Open the file that ``url`` names.

    Raises:
        ValueError: the URL names no file.
        WeakDurability: the file cannot be used with WAL and full fsync.
    """
    if url.database in (None, "", ":memory:") or url.query:
        raise ValueError("a SQLite URL must name a file and carry no options: sqlite+aiosqlite:////var/lib/x.db")
    reader = _engine(url, size=READERS, busy_timeout_ms=READ_BUSY_TIMEOUT_MS, query_only=True)
    writing = _engine(url, size=1, busy_timeout_ms=0, query_only=False)  # GroupWriter waits for the lock itself
    wakeups = SqliteWakeups(Path(str(url.database)))

    def open_transaction(connection: AsyncConnection) -> Transaction:
        return Transaction(connection, clock=clock, blob_dir=blob_dir, read_only=False)

    writer = GroupWriter(writing, open_transaction=open_transaction, on_change=wakeups.changed_to)
    try:
        await _check_durability(writing)
        async with writer.running():
            yield SqliteTransactions(reader, writer, wakeups, clock=clock, blob_dir=blob_dir)
    finally:
        await wakeups.close()
        await reader.dispose()
        await writing.dispose()


def _engine(url: URL, *, size: int, busy_timeout_ms: int, query_only: bool) -> AsyncEngine:
    # isolation_level None: the driver begins nothing on its own, so that BEGIN IMMEDIATE is ours.
    engine = create_async_engine(
        url,
        pool_size=size,
        max_overflow=0,
        pool_timeout=30,
        connect_args={"isolation_level": None},
        execution_options={"preserve_rowcount": True},
    )

    @event.listens_for(engine.sync_engine, "connect")
    def configure(connection: Any, _record: Any) -> None:  # pyright: ignore[reportUnusedFunction]
        cursor = connection.cursor()
        for pragma in (
            f"busy_timeout = {READ_BUSY_TIMEOUT_MS}",  # for the switch to WAL
            "journal_mode = WAL",
            "synchronous = FULL",
            "foreign_keys = ON",
            f"query_only = {'ON' if query_only else 'OFF'}",
            f"busy_timeout = {busy_timeout_ms}",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    return engine


async def _check_durability(engine: AsyncEngine) -> None:
    async with engine.connect() as connection:
        mode = (await connection.exec_driver_sql("PRAGMA journal_mode")).scalar_one()
        synchronous = (await connection.exec_driver_sql("PRAGMA synchronous")).scalar_one()
    if mode != "wal" or synchronous not in (2, 3):
        raise WeakDurability(
            f"SQLite runs with journal_mode={mode}, synchronous={synchronous}; it must run with wal and FULL. "
            "The database must be a file on a local disk."
        )
