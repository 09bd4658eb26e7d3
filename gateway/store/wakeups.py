"""One source of "something was committed", for this process and the others.

Only transactions that announce count: heartbeats and locks do not wake anybody.

SQLite has no messages. A transaction that announces advances ``PRAGMA user_version`` (part of the file, and of the
transaction); the writer's own process learns of it after the commit, the others by looking at ``PRAGMA data_version``
every 10 ms while somebody waits, every 50 ms while only patient ones do: an idle process pays for waking up, not for
the look. PostgreSQL sends NOTIFY with the commit itself.
"""

import asyncio
import sqlite3
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg

POLL_S = 0.01
PATIENT_POLL_S = 0.05
CHANNEL = "loopline"
_RECONNECT_S = 0.5


class _Counter:
    """A number that waiters watch."""

    def __init__(self) -> None:
        self.value = 0
        self._waiters: set[asyncio.Future[None]] = set()

    def set(self, value: int) -> None:
        if value != self.value:
            self.value = value
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def wait(self, seen: int, timeout_s: float) -> int:
        if self.value == seen and timeout_s > 0:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await asyncio.wait([waiter], timeout=timeout_s)
            finally:
                self._waiters.discard(waiter)
        return self.value


class SqliteWakeups:
    """Wakeups whose counter is the file's ``user_version``.

    A look is one PRAGMA on a connection that never waits for a lock: it takes microseconds, less than going to a
    thread for it would.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counter = _Counter()
        self._waiting = self._hurried = 0
        self._pause_s = POLL_S
        self._connection: sqlite3.Connection | None = None
        self._data_version = -1
        self._poller: asyncio.Task[None] | None = None

    def changed_to(self, value: int) -> None:
        """Note a change that this process has just committed."""
        self._counter.set(value)

    async def wait(self, seen: int, timeout_s: float, *, patient: bool = False) -> int:
        if self._counter.value != seen:
            return self._counter.value
        self._waiting += 1
        self._hurried += not patient
        try:
            self._look()
            if self._poller is not None and self._pause_s > POLL_S and not patient:
                self._poller.cancel()
                self._poller = None
            if self._poller is None or self._poller.done():
                self._poller = asyncio.create_task(self._poll(), name="wakeups")
            return await self._counter.wait(seen, timeout_s)
        finally:
            self._waiting -= 1
            self._hurried -= not patient

    async def close(self) -> None:
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.wait([self._poller])
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _poll(self) -> None:
        while self._waiting:
            self._pause_s = POLL_S if self._hurried else PATIENT_POLL_S
            await asyncio.sleep(self._pause_s)
            self._look()

    def _look(self) -> None:
        """Read the counter when any other connection has changed the file since the last look."""
        with suppress(sqlite3.OperationalError):  # busy for a moment, during recovery: the next look is near
            if self._connection is None:
                self._connection = sqlite3.connect(self._path, isolation_level=None, timeout=0)
            data_version = self._pragma(self._connection, "data_version")
            if data_version != self._data_version:
                value = self._pragma(self._connection, "user_version")
                self._data_version = data_version
                self._counter.set(value)

    def _pragma(self, connection: sqlite3.Connection, name: str) -> int:
        return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


class PostgresWakeups:
    """Wakeups on LISTEN, over one connection of its own from the first wait on.

    Whatever may have been missed while it was not listening counts as a change.
    """

    def __init__(self, connect_arguments: Mapping[str, Any]) -> None:
        self._connect_arguments = dict(connect_arguments)
        self._counter = _Counter()
        self._listener: asyncio.Task[None] | None = None

    async def wait(self, seen: int, timeout_s: float, *, patient: bool = False) -> int:
        if self._listener is None:
            self._listener = asyncio.create_task(self._listen(), name="wakeups")
        return await self._counter.wait(seen, timeout_s)

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.wait([self._listener])

    async def _listen(self) -> None:
        while True:
            with suppress(psycopg.Error, OSError):
                connection = await psycopg.AsyncConnection.connect(**self._connect_arguments, autocommit=True)
                async with connection:
                    await connection.execute(f"LISTEN {CHANNEL}")
                    self._changed()
                    async for _ in connection.notifies():
                        self._changed()
            await asyncio.sleep(_RECONNECT_S)

    def _changed(self) -> None:
        self._counter.set(self._counter.value + 1)
