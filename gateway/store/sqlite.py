"""SQLite: WAL with full fsync, readers that never block, one group-committing writer per process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import QueuePool

from gateway.core.clock import Clock
from gateway.store.failures import is_busy
from gateway.store.threads import ThreadConnection, ThreadPool
from gateway.store.transaction import Transaction
from gateway.store.trips import InlineTransaction, Traveller, Work, finished
from gateway.store.unfit import UnfitDatabase, weak
from gateway.store.wakeups import SqliteWakeups
from gateway.store.writer import GroupWriter

T = TypeVar("T")
READERS = 8
READ_BUSY_TIMEOUT_MS = 10_000


class SqliteTransactions:
    """Reads on a pool of connections, writes through the group writer."""

    def __init__(
        self,
        readers: ThreadPool,
        glances: Engine,
        writer: GroupWriter,
        wakeups: SqliteWakeups,
        *,
        clock: Clock,
        blob_dir: Path,
    ) -> None:
        self._readers = readers
        self._glances = glances
        self._writer = writer
        self._clock = clock
        self._blob_dir = blob_dir
        self.wakeups = wakeups

    @property
    def commits(self) -> int:
        return self._writer.commits

    @asynccontextmanager
    async def read(self) -> AsyncIterator[Transaction]:
        async with self._readers.connect(_begin) as connection:
            transaction = Transaction(
                connection, postgres=False, clock=self._clock, blob_dir=self._blob_dir, read_only=True
            )
            try:
                yield transaction
            finally:
                await transaction.settle()

    async def ask(self, work: Work[T]) -> T:
        traveller = Traveller(work)

        def run(connection: Connection) -> Any:
            return traveller.run(self._inline(connection))

        return await self._readers.run(run)

    async def glance(self, work: Work[T]) -> T:
        """A reader waits for nobody, but while the log is recovered; then ``ask`` waits, in a thread."""
        try:
            with self._glances.connect() as connection:
                return finished(work(self._inline(connection)))
        except OperationalError as error:
            if not is_busy(error):
                raise
        return await self.ask(work)

    def _inline(self, connection: Connection) -> InlineTransaction:
        _begin(connection)
        return InlineTransaction(connection, clock=self._clock, blob_dir=self._blob_dir, read_only=True)

    async def apply(self, work: Work[T], *, durable: bool = True) -> T:
        return await self._writer.apply(work, durable=durable)

    async def jot(self, work: Work[T]) -> T:
        return await self._writer.jot(work)

    @asynccontextmanager
    async def write(self, *, durable: bool = True) -> AsyncIterator[Transaction]:
        async with self._writer.unit(durable=durable) as transaction:
            yield transaction


@asynccontextmanager
async def open_sqlite(url: URL, *, blob_dir: Path, clock: Clock, allow_weak: bool) -> AsyncIterator[SqliteTransactions]:
    """Open the file that ``url`` names.

    Raises:
        UnfitDatabase: the URL names no file.
        WeakDurability: the file cannot be used with WAL and full fsync.
    """
    if url.database in (None, "", ":memory:") or url.query:
        raise UnfitDatabase("a SQLite URL must name a file and carry no options: sqlite:////var/lib/loopline.db")
    reading = _engine(url, size=READERS, busy_timeout_ms=READ_BUSY_TIMEOUT_MS, query_only=True)
    readers = ThreadPool(reading, size=READERS, name="sqlite-read")
    glances = _engine(url, size=1, busy_timeout_ms=0, query_only=True)
    # Busy timeout 0: GroupWriter waits for the lock itself, off the thread.
    writing = ThreadPool(_engine(url, size=1, busy_timeout_ms=0, query_only=False), size=1, name="sqlite-write")
    wakeups = SqliteWakeups(Path(str(url.database)))

    def open_transaction(connection: ThreadConnection) -> Transaction:
        return Transaction(connection, postgres=False, clock=clock, blob_dir=blob_dir, read_only=False)

    def open_inline(connection: Connection) -> InlineTransaction:
        return InlineTransaction(connection, clock=clock, blob_dir=blob_dir, read_only=False)

    writer = GroupWriter(
        writing, open_transaction=open_transaction, open_inline=open_inline, on_change=wakeups.changed_to
    )
    try:
        async with writing.connect() as connection:
            await connection.run_sync(lambda sync: _check_durability(sync, allow_weak=allow_weak))
        await asyncio.to_thread(lambda: glances.connect().close())  # opening may wait for others
        async with writer.running():
            yield SqliteTransactions(readers, glances, writer, wakeups, clock=clock, blob_dir=blob_dir)
    finally:
        await wakeups.close()
        glances.dispose()
        await readers.dispose()
        await writing.dispose()


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")


def _engine(url: URL, *, size: int, busy_timeout_ms: int, query_only: bool) -> Engine:
    # isolation_level None: the driver begins nothing on its own, so that BEGIN IMMEDIATE is ours.
    engine = create_engine(
        url.set(drivername="sqlite"),
        poolclass=QueuePool,
        pool_size=size,
        max_overflow=0,
        connect_args={"isolation_level": None, "check_same_thread": False},
        execution_options={"preserve_rowcount": True},
    )

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: Any) -> None:  # pyright: ignore[reportUnusedFunction]
        cursor = connection.cursor()
        for pragma in (
            f"busy_timeout = {READ_BUSY_TIMEOUT_MS}",  # for the switch to WAL
            "journal_mode = WAL",
            "synchronous = FULL",
            "foreign_keys = ON",
            "temp_store = MEMORY",  # savepoints would keep their journals in files
            f"query_only = {'ON' if query_only else 'OFF'}",
            f"busy_timeout = {busy_timeout_ms}",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    return engine


def _check_durability(connection: Connection, *, allow_weak: bool) -> None:
    mode = connection.exec_driver_sql("PRAGMA journal_mode").scalar_one()
    synchronous = connection.exec_driver_sql("PRAGMA synchronous").scalar_one()
    if mode != "wal" or synchronous not in (2, 3):
        weak(
            f"SQLite runs with journal_mode={mode}, synchronous={synchronous}; it must run with wal and FULL. "
            "The database must be a file on a local disk",
            allowed=allow_weak,
        )
