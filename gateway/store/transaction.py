"""One open transaction, as the stores see it: run statements, and say at the end whether others should wake up."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sqlalchemy import Connection, Executable, RowMapping, Table
from sqlalchemy.dialects import postgresql, sqlite

from gateway.core.clock import Clock

T = TypeVar("T")
S = TypeVar("S", bound=Executable)
_BUILT: dict[tuple[object, Table, bool], Any] = {}


class AnyConnection(Protocol):
    """What a transaction needs of a connection: SQLAlchemy's ``AsyncConnection`` and ``ThreadConnection`` have it."""

    async def run_sync(self, fn: Callable[[Connection], T], /) -> T: ...


class Transaction:
    """Statements of one unit of work. The owner of the connection begins and ends it.

    A cancelled caller does not interrupt a statement: that would break the connection, and on SQLite everybody
    else's units with it. The statement runs on, and ``settle`` waits for it before the transaction ends.
    """

    def __init__(
        self, connection: AnyConnection | None, *, postgres: bool, clock: Clock, blob_dir: Path, read_only: bool
    ) -> None:
        self._connection = connection
        self._postgres = postgres
        self._read_only = read_only
        self._running: asyncio.Task[Any] | None = None
        self.clock = clock
        self.blob_dir = blob_dir
        self.announced = False

    async def rows(self, statement: Executable, values: Mapping[str, Any] | None = None) -> Sequence[RowMapping]:
        return await self._run(lambda connection: connection.execute(statement, values).mappings().all())

    async def first(self, statement: Executable, values: Mapping[str, Any] | None = None) -> RowMapping | None:
        rows = await self.rows(statement, values)
        return rows[0] if rows else None

    async def write(self, statement: Executable, values: Mapping[str, Any] | None = None) -> int:
        """Run a statement that changes rows; return how many."""
        self._require_writable()
        return await self._run(lambda connection: connection.execute(statement, values).rowcount)

    async def write_returning(self, statement: Executable) -> Sequence[RowMapping]:
        """Run a statement with a RETURNING clause."""
        self._require_writable()
        return await self._run(lambda connection: connection.execute(statement).mappings().all())

    async def look(self, work: Callable[[Connection], T]) -> T:
        """Run ``work``, which only reads, on the connection itself."""
        return await self._run(work)

    async def change(self, work: Callable[[Connection], T]) -> T:
        """Run ``work`` on the connection itself."""
        self._require_writable()
        return await self._run(work)

    async def insert_new(self, table: Table, values: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> int:
        """Insert the rows that break no unique constraint; return how many were new."""
        self._require_writable()
        statement = self.once(insert_if_new, table)  # compiled once, however many rows there are
        return await self._run(lambda connection: connection.execute(statement, values).rowcount)

    def insert(self, table: Table) -> "sqlite.Insert | postgresql.Insert":
        """Return an INSERT that knows ON CONFLICT."""
        return postgresql.insert(table) if self._postgres else sqlite.insert(table)

    def once(self, build: Callable[["Transaction", Table], S], table: Table) -> S:
        """Return what ``build`` returns, made once for each kind of database: building takes longer than running."""
        key = (build, table, self._postgres)
        if key not in _BUILT:
            _BUILT[key] = build(self, table)
        return _BUILT[key]

    def announce(self) -> None:
        """Wake everybody who waits, once this transaction is committed."""
        self._require_writable()
        self.announced = True

    async def settle(self) -> None:
        """Return when no statement is running any more."""
        if self._running is not None and not self._running.done():
            await asyncio.wait([self._running])
        if self._running is not None and not self._running.cancelled():
            self._running.exception()

    def _require_writable(self) -> None:
        if self._read_only:
            raise RuntimeError("this unit of work only reads")

    async def _run(self, work: Callable[[Connection], T]) -> T:
        assert self._connection is not None
        self._running = task = asyncio.ensure_future(self._connection.run_sync(work))
        return await asyncio.shield(task)


def insert_if_new(transaction: Transaction, table: Table) -> "sqlite.Insert | postgresql.Insert":
    """Return an INSERT that leaves rows alone that break a unique constraint."""
    return transaction.insert(table).on_conflict_do_nothing()
