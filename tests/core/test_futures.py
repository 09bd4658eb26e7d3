"""Long polls, against the store on both databases."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.core.errors import NotFound, Unavailable
from gateway.core.futures import Futures
from gateway.core.ids import OperationId, ProjectId
from gateway.core.operations import Status
from gateway.core.ports import UnitOfWork
from gateway.store import SqlDatabase
from gateway.store.postgres import CONNECTIONS, OVERFLOW
from tests.store.bench import Bench
from tests.store.conftest import (
    bench,
    clock,
    database,
    postgres,
    postgres_url,
    shared_postgres_url,
    sqlite_template,
    sqlite_url,
    url,
)

__all__ = [
    "bench",
    "clock",
    "database",
    "postgres",
    "postgres_url",
    "shared_postgres_url",
    "sqlite_template",
    "sqlite_url",
    "url",
]


@pytest.fixture
async def futures(bench: Bench) -> AsyncIterator[Futures]:
    async with Futures(bench.database, bench.database.wakeups, lambda unit: unit.operations) as futures:
        yield futures


async def test_a_final_operation_is_returned_at_once(bench: Bench, futures: Futures) -> None:
    await bench.submit(await bench.open())
    done = await bench.run_one()

    assert await asyncio.wait_for(futures.wait(bench.project_id, done.id, 60), 1) == done


async def test_a_waiter_is_woken_by_the_result(bench: Bench, futures: Futures) -> None:
    operation = await bench.submit(await bench.open())
    waiter = asyncio.create_task(futures.wait(bench.project_id, operation.id, 60))
    work = await bench.claimed()
    assert not waiter.done()
    await bench.finish(work)

    assert (await asyncio.wait_for(waiter, 1)).status is Status.COMPLETED


async def test_an_unfinished_operation_is_returned_as_it_stands_when_time_is_up(bench: Bench, futures: Futures) -> None:
    operation = await bench.submit(await bench.open(), seq=2)

    at_once = await futures.wait(bench.project_id, operation.id, 0)
    later = await asyncio.wait_for(futures.wait(bench.project_id, operation.id, 0.1), 1)

    assert at_once == later == operation
    assert (later.queue_position, later.waits_for_seq) == (0, 1)


async def test_many_waiters_are_served_by_few_queries(bench: Bench) -> None:
    database = Counting(bench.database)
    session = await bench.open()
    operations = [await bench.submit(session) for _ in range(20)]
    async with Futures(database, bench.database.wakeups, lambda unit: unit.operations) as futures:
        waiters = [
            asyncio.create_task(futures.wait(bench.project_id, operation.id, 60)) for operation in operations * 3
        ]
        await bench.run_one()
        await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED, timeout=2)
        before = database.reads
        for _ in range(19):
            await bench.run_one()
        done = await asyncio.wait_for(asyncio.gather(*waiters), 15)

    assert {operation.status for operation in done} == {Status.COMPLETED}
    # Each waiter reads its own result once; the looks in between are one per commit, for all waiters together.
    assert database.reads - before <= len(waiters) + 2 * 19


async def test_more_waiters_than_there_are_connections_keep_nobody_from_working(bench: Bench, futures: Futures) -> None:
    count = 2 * (CONNECTIONS + OVERFLOW)
    session = await bench.open()
    operation = await bench.submit(session)
    async with asyncio.TaskGroup() as group:
        waiters = [group.create_task(futures.wait(bench.project_id, operation.id, 60)) for _ in range(count)]
        for _ in range(3):  # meanwhile each has read that there is nothing yet
            await asyncio.wait_for(bench.submit(session), 5)
        assert futures.waiting == count
        assert not any(waiter.done() for waiter in waiters)
        await asyncio.wait_for(bench.run_one(), 5)

    assert {waiter.result().status for waiter in waiters} == {Status.COMPLETED}


async def test_a_strangers_operation_is_missing(bench: Bench, futures: Futures) -> None:
    operation = await bench.submit(await bench.open())

    with pytest.raises(NotFound) as theirs:
        await futures.wait(ProjectId("proj-other"), operation.id, 60)
    with pytest.raises(NotFound):
        await futures.wait(bench.project_id, OperationId("op-none"), 60)
    assert theirs.value.message == f"no operation {operation.id!r}"


async def test_a_cancelled_wait_leaves_nothing_behind(bench: Bench, futures: Futures) -> None:
    operation = await bench.submit(await bench.open())
    waiter = asyncio.create_task(futures.wait(bench.project_id, operation.id, 60))
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)

    await bench.run_one()
    assert (await futures.wait(bench.project_id, operation.id, 60)).status is Status.COMPLETED


@pytest.mark.parametrize("trouble", [Unavailable("away"), RuntimeError("a defect of ours")])
async def test_waiters_outlive_a_database_that_is_away_for_a_moment_and_a_look_that_fails(
    bench: Bench, trouble: Exception
) -> None:
    database = Counting(bench.database)
    operation = await bench.submit(await bench.open())
    async with Futures(database, bench.database.wakeups, lambda unit: unit.operations) as futures:
        waiter = asyncio.create_task(futures.wait(bench.project_id, operation.id, 60))
        while not database.reads:
            await asyncio.sleep(0)
        database.trouble = trouble
        await bench.open()  # wakes the watcher, which finds nobody
        while not database.refused:
            await asyncio.sleep(0)
        database.trouble = None
        await bench.run_one()

        assert (await asyncio.wait_for(waiter, 2)).status is Status.COMPLETED


class Counting:
    """A database that counts its reads and can be in trouble."""

    def __init__(self, database: SqlDatabase) -> None:
        self._database = database
        self.reads = 0
        self.refused = 0
        self.trouble: Exception | None = None

    @asynccontextmanager
    async def read(self) -> AsyncIterator[UnitOfWork]:
        if self.trouble is not None:
            self.refused += 1
            raise self.trouble
        self.reads += 1
        async with self._database.read() as unit:
            yield unit

    @asynccontextmanager
    async def write(self) -> AsyncIterator[UnitOfWork]:
        async with self._database.write() as unit:
            yield unit
