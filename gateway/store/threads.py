"""SQLite connections on threads of their own.

SQLite blocks, so its calls leave the event loop; one statement, with fetching its rows, is one trip to a thread. (A
driver that makes every cursor call a trip of its own costs several times as much.)
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from sqlalchemy import Connection, Engine

T = TypeVar("T")


class ThreadConnection:
    """A connection that is used from threads, by one caller at a time."""

    def __init__(self, connection: Connection, executor: ThreadPoolExecutor) -> None:
        self._connection = connection
        self._executor = executor

    @property
    def dialect_name(self) -> str:
        return self._connection.dialect.name

    async def run_sync(self, work: Callable[[Connection], T]) -> T:
        """Run ``work`` in a thread. Cancelling the caller does not interrupt it."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, self._connection)


class ThreadPool:
    """Up to ``size`` connections of one engine, each call on one of as many threads."""

    def __init__(self, engine: Engine, *, size: int, name: str) -> None:
        self._engine = engine
        self._executor = ThreadPoolExecutor(max_workers=size, thread_name_prefix=name)
        self._free = asyncio.Semaphore(size)  # a thread must never wait for a connection: its holder needs a thread

    @asynccontextmanager
    async def connect(self, begin: Callable[[Connection], None] | None = None) -> AsyncIterator[ThreadConnection]:
        """Hold a connection, on which ``begin`` was run. What was not committed is rolled back at the end."""
        loop = asyncio.get_running_loop()

        def close(connection: Connection) -> None:
            connection.rollback()
            connection.close()

        def open_() -> Connection:
            connection = self._engine.connect()
            try:
                if begin is not None:
                    begin(connection)
            except BaseException:
                close(connection)
                raise
            return connection

        async with self._free:
            opening = loop.run_in_executor(self._executor, open_)
            try:
                connection = await asyncio.shield(opening)
            except asyncio.CancelledError:
                await asyncio.wait([opening])
                if opening.exception() is None:
                    await loop.run_in_executor(self._executor, close, opening.result())
                raise
            try:
                yield ThreadConnection(connection, self._executor)
            finally:
                closing = loop.run_in_executor(self._executor, close, connection)
                try:
                    await asyncio.shield(closing)
                except asyncio.CancelledError:
                    await asyncio.wait([closing])
                    raise

    async def run(self, work: Callable[[Connection], T]) -> T:
        """Run ``work`` in a thread on a connection of its own; what it did not commit is rolled back. A cancelled
        caller waits for its end."""
        async with self._free:
            running = asyncio.get_running_loop().run_in_executor(self._executor, self._run, work)
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                await asyncio.wait([running])
                raise

    def run_here(self, work: Callable[[Connection], T]) -> T:
        """As ``run``, on the caller's own thread: for a pool of which nobody uses anything."""
        if self._free.locked():
            raise RuntimeError("every connection is in use")
        return self._run(work)

    def _run(self, work: Callable[[Connection], T]) -> T:
        with self._engine.connect() as connection:
            return work(connection)

    async def dispose(self) -> None:
        """Close the connections and end the threads; nobody holds one any more."""
        await asyncio.get_running_loop().run_in_executor(self._executor, self._engine.dispose)
        self._executor.shutdown()
