"""Group commit on SQLite: concurrent units of work share one transaction, and so one fsync.

One task owns the process's only writing connection. Units queue up; each gets its turn inside the open transaction,
under a savepoint; when nobody waits, the task commits, and only then do the units return. A lone unit pays no
delay. The write lock of the file is held while a group is open and never in between, because other processes write
the same file.

Work that comes whole (``apply``) is run in the thread from its first statement to its last, with everything else that
waits there in this form: a group of such units is one trip, from its beginning to its commit.

A group that starts with a unit that need not be durable takes only such units and commits without fsync: the next
durable group's fsync covers it, since it syncs the whole log. Until then only a loss of power can take it back.

A failed fsync may leave a hole in the log that no later one fills, and behind a hole nothing is read again after a loss
of power. So before the next group all of the log is copied to the database, which is synced, and the log begins anew.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from gateway.store.failures import is_unsynced
from gateway.store.groups import (
    LockedByOther,
    begin_fleeting,
    begin_lasting,
    commit,
    commit_announced,
    restarted,
    travel,
)
from gateway.store.threads import ThreadConnection, ThreadPool
from gateway.store.transaction import Transaction
from gateway.store.trips import InlineTransaction, Traveller, Work
from gateway.store.units import Trip, Unit, keep_savepoint, savepoint, undo_savepoint

T = TypeVar("T")

MAX_GROUP_UNITS = 128
MAX_GROUP_S = 0.1  # no unit waits longer than about this for its group to close,
LATE_GROUP_UNITS = 8  # unless the machine is so slow that even so few take longer
LOCK_TIMEOUT_S = 30.0  # how long to try while another process writes
_LOCK_RETRY_S = 0.002
_OTHERS_TURN_S = 0.005  # left free after a group that closed with units waiting, so that other processes get in


class GroupWriter:
    """Serialises units of work. ``commits`` counts the transactions that were made durable."""

    def __init__(
        self,
        connections: ThreadPool,
        *,
        open_transaction: Callable[[ThreadConnection], Transaction],
        open_inline: Callable[[Connection], InlineTransaction],
        on_change: Callable[[int], None],
    ) -> None:
        self._connections = connections
        self._open_transaction = open_transaction
        self._open_inline = open_inline
        self._on_change = on_change
        self._queue: asyncio.Queue[Unit | Trip | None] = asyncio.Queue()
        self._put_back: Unit | Trip | None = None  # waits for a group of its own kind
        self._inside: set[asyncio.Task[Any] | None] = set()
        self._open = False
        self._working = False  # a unit has been taken out of the queue and is not settled yet
        self._hole = False  # a sync of the log failed
        self._busy_since: float | None = None  # when the first of a row of groups began that leave nothing free
        self.commits = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator["GroupWriter"]:
        """Own the writing task; leaving waits until every queued unit is settled."""
        task = asyncio.create_task(self._run(), name="group-writer")
        self._open = True
        try:
            yield self
        finally:
            self._open = False
            self._queue.put_nowait(None)
            await task

    @asynccontextmanager
    async def unit(self, *, durable: bool) -> AsyncIterator[Transaction]:
        """Run one unit of work; leaving it normally returns after the group's commit, with fsync if ``durable``.

        Raises:
            Unavailable: another process held the write lock too long, or the commit failed: nothing was recorded.
        """
        caller = self._caller()
        unit = Unit(lasting=durable)
        self._queue.put_nowait(unit)
        self._inside.add(caller)
        try:
            transaction = await unit.turn
            yield transaction
        except BaseException:
            unit.ended.set_result(False)
            raise
        else:
            unit.ended.set_result(True)
        finally:
            self._inside.discard(caller)
        await unit.durable

    async def apply(self, work: Work[T], *, durable: bool) -> T:
        """Run one unit of work that waits for nothing but its unit; return after its group's commit.

        A cancelled caller that the unit has begun for waits until it is committed, or not.

        Raises:
            Unavailable: as ``unit``.
        """
        self._caller()
        trip = Trip(traveller=Traveller(work), lasting=durable)
        self._queue.put_nowait(trip)
        try:
            return await asyncio.shield(trip.outcome)
        except asyncio.CancelledError:
            if trip.begun:
                await asyncio.wait([trip.outcome])
                trip.outcome.exception()
            else:
                trip.outcome.cancel()
            raise

    async def jot(self, work: Work[T]) -> T:
        """As ``apply``, not durable, for a few rows by their keys: while nothing else is written it is done here and
        now, which takes less than going to the thread."""
        caller = self._caller()
        if self._working or self._hole or not self._queue.empty():
            return await self.apply(work, durable=False)
        trip, locked = Trip(traveller=Traveller(work), lasting=False), False
        self._inside.add(caller)
        try:
            change = self._connections.run_here(
                lambda connection: travel(connection, [trip], self._open_inline, lasting=False)
            )
        except LockedByOther:
            locked = True
        except SQLAlchemyError as error:
            trip.fail(error)
        else:
            if change is not None:
                self._on_change(change)
            trip.committed()
        finally:
            self._inside.discard(caller)
        return await (self.apply(work, durable=False) if locked else trip.outcome)

    def _caller(self) -> asyncio.Task[Any] | None:
        if not self._open:
            raise RuntimeError("the database is closed")
        caller = asyncio.current_task()
        if caller in self._inside:
            raise RuntimeError("a unit of work was opened inside another one: it would wait for itself")
        return caller

    async def _run(self) -> None:
        try:
            while (unit := self._put_back or await self._queue.get()) is not None:
                self._put_back = None
                self._working = not unit.over
                if unit.over:
                    continue
                if isinstance(unit, Trip):
                    await self._run_trips(unit)
                else:
                    await self._run_group(unit)
                self._working = self._put_back is not None
        except BaseException as error:  # nobody may wait for a writer that is gone
            self._open = False
            self._fail_queued(error)
            raise

    def _fail_queued(self, error: BaseException) -> None:
        if self._put_back is not None:
            self._put_back.fail(error)
            self._put_back = None
        while not self._queue.empty():
            unit = self._queue.get_nowait()
            if unit is None:
                self._queue.put_nowait(None)
                return
            unit.fail(error)

    async def _run_trips(self, first: Trip) -> None:
        """Take every whole unit that waits, and run them all in one go."""
        loop = asyncio.get_running_loop()
        opened = loop.time()
        self._busy_since = self._busy_since or opened
        trips = [first]
        while len(trips) < MAX_GROUP_UNITS and (unit := await self._next(lasting=first.lasting)) is not None:
            if not isinstance(unit, Trip):
                self._put_back = unit
                break
            trips.append(unit)
        trips = [trip for trip in trips if not trip.over]  # one may have been given up while others were gathered
        for trip in trips:
            trip.begun = True
        try:
            if self._hole:
                async with self._connections.connect() as connection:
                    await self._restart_log(connection)
            change = await self._when_free(
                lambda: self._connections.run(
                    lambda connection: travel(connection, trips, self._open_inline, lasting=first.lasting)
                )
            )
        except BaseException as error:
            self._hole = self._hole or is_unsynced(error)
            for trip in trips:
                trip.fail(error)
            if not isinstance(error, SQLAlchemyError):
                raise
        else:
            self.commits += first.lasting
            if change is not None:
                self._on_change(change)
            for trip in trips:
                trip.committed()
        if self._put_back is None and self._queue.empty():
            self._busy_since = None
        elif loop.time() - self._busy_since >= MAX_GROUP_S:
            self._busy_since = None
            await asyncio.sleep(_OTHERS_TURN_S)

    async def _run_group(self, first: Unit) -> None:
        loop = asyncio.get_running_loop()
        kept: list[Unit | Trip] = []
        crowded = False
        unit: Unit | Trip | None = first
        try:
            async with self._connections.connect() as connection:
                if self._hole:
                    await self._restart_log(connection)
                begin = begin_lasting if first.lasting else begin_fleeting
                await self._when_free(lambda: connection.run_sync(begin))
                opened, count, announced = loop.time(), 0, False
                while unit is not None:
                    if not unit.over:
                        count += 1
                        if isinstance(unit, Trip):
                            transaction = await self._serve_trip(connection, unit)
                        else:
                            transaction = await self._serve(connection, unit)
                        if transaction is not None:
                            kept.append(unit)
                            announced = announced or transaction.announced
                    late = loop.time() - opened >= MAX_GROUP_S and count >= LATE_GROUP_UNITS
                    crowded = late or count >= MAX_GROUP_UNITS
                    unit = None if crowded else await self._next(lasting=first.lasting)
                if kept:
                    change = await connection.run_sync(commit_announced if announced else commit)
                    self.commits += first.lasting
                    if change is not None:
                        self._on_change(change)
        except BaseException as error:
            self._hole = self._hole or is_unsynced(error)
            for failed in [*kept, *([unit] if unit is not None else [])]:
                failed.fail(error)
            if not isinstance(error, SQLAlchemyError):
                raise
        else:
            for done in kept:
                done.committed()
        if crowded:
            await asyncio.sleep(_OTHERS_TURN_S)

    async def _serve(self, connection: ThreadConnection, unit: Unit) -> Transaction | None:
        """Give ``unit`` its turn; return its transaction when it is kept, None when it was rolled back.

        When SQLite itself rolled the whole transaction back (disk full, I/O error), the savepoint is gone, the
        statements here fail, and with them the group: nothing of it is acknowledged.
        """
        await connection.run_sync(savepoint)
        transaction = self._open_transaction(connection)
        if not unit.turn.done():
            unit.turn.set_result(transaction)
        keep = await unit.ended
        await transaction.settle()
        await connection.run_sync(keep_savepoint if keep else undo_savepoint)
        return transaction if keep else None

    async def _serve_trip(self, connection: ThreadConnection, trip: Trip) -> Transaction | None:
        """As ``_serve``, in one go."""
        trip.begun = True

        def run(sync: Connection) -> InlineTransaction | None:
            transaction = self._open_inline(sync)
            return transaction if trip.run(sync, transaction) else None

        transaction = await connection.run_sync(run)
        if transaction is None:
            trip.committed()
        return transaction

    async def _next(self, *, lasting: bool) -> Unit | Trip | None:
        """Return a unit that waits, None when the group should close. A ``lasting`` group takes every unit."""
        if self._queue.empty():
            await asyncio.sleep(0)  # tasks that are ready may be about to queue one
        if self._queue.empty():
            return None
        unit = self._queue.get_nowait()
        if unit is None:
            self._queue.put_nowait(None)
        elif unit.lasting and not lasting:
            self._put_back = unit
            return None
        return unit

    async def _restart_log(self, connection: ThreadConnection) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LOCK_TIMEOUT_S
        while not await connection.run_sync(restarted):
            if loop.time() >= deadline:
                raise SQLAlchemyError("a sync of the log failed, and others use the log too much to begin a new one")
            await asyncio.sleep(_LOCK_RETRY_S)
        self._hole = False

    async def _when_free(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Make ``attempt`` until it is not another process that has the write lock."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LOCK_TIMEOUT_S
        while True:
            try:
                return await attempt()
            except LockedByOther as locked:
                if loop.time() >= deadline:
                    self._fail_queued(locked.error)
                    raise locked.error from None
            await asyncio.sleep(_LOCK_RETRY_S)
