"""One open transaction, as the stores see it: run statements, and say at the end whether others should wake up."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Executable, RowMapping, Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.core.clock import Clock

T = TypeVar("T")


class Transaction:
    """Statements of one unit of work. The owner of the connection begins and ends it.

    A cancelled caller does not interrupt a statement: that would break the connection, and on SQLite everybody
    else's units with it. The statement runs on, and ``settle`` waits for it before the transaction ends.
    """

    def __init__(self, connection: AsyncConnection, *, clock: Clock, blob_dir: Path, read_only: bool) -> None:
        self._connection = connection
        self._read_only = read_only
        self._running: asyncio.Task[Any] | None = None
        self.clock = clock
        self.blob_dir = blob_dir
        self.announced = False

    @property
    def postgres(self) -> bool:
        return self._connection.dialect.name == "postgresql"

    async def rows(self, statement: Executable) -> Sequence[RowMapping]:
        return await self._run(self._rows(statement, None))

    async def first(self, statement: Executable) -> RowMapping | None:
        rows = await self.rows(statement)
        return rows[0] if rows else None

    async def write(self, statement: Executable, parameters: Sequence[Mapping[str, Any]] | None = None) -> int:
        """Run a statement that changes rows; return how many."""
        self._require_writable()
        return await self._run(self._rowcount(statement, parameters))

    async def write_returning(self, statement: Executable) -> Sequence[RowMapping]:
        """Run a statement with a RETURNING clause."""
        self._require_writable()
        return await self._run(self._rows(statement, None))

    async def insert_new(self, table: Table, values: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> int:
        """Insert the rows that break no unique constraint; return how many were new."""
        return await self.write(self.insert(table).values(values).on_conflict_do_nothing())

    def insert(self, table: Table) -> "sqlite.Insert | postgresql.Insert":
        """Return an INSERT that knows ON CONFLICT."""
        return postgresql.insert(table) if self.postgres else sqlite.insert(table)

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

    async def _run(self, statement: Coroutine[Any, Any, T]) -> T:
        self._running = task = asyncio.ensure_future(statement)
        return await asyncio.shield(task)

    async def _rows(
        self, statement: Executable, parameters: Sequence[Mapping[str, Any]] | None
    ) -> Sequence[RowMapping]:
        result = await self._connection.execute(statement, parameters)
        return result.mappings().all()

    async def _rowcount(self, statement: Executable, parameters: Sequence[Mapping[str, Any]] | None) -> int:
        result = await self._connection.execute(statement, parameters)
        return result.rowcount
