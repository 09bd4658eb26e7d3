"""Long polls, against the store on a SQLite file."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import migrations
from gateway.core.errors import NotFound, Unavailable
from gateway.core.futures import Futures
from gateway.core.ids import OperationId, ProjectId
from gateway.core.operations import Status
from gateway.core.ports import UnitOfWork
from gateway.store import SqlDatabase, open_database
from tests.store.bench import Bench, HandClock, open_bench


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    url = f"sqlite:///{tmp_path}/loopline.db"
    migrations.upgrade(url)
    async with open_database(url, blob_dir=tmp_path / "blobs") as database:
        yield await open_bench(database, HandClock())


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
        done = await asyncio.wait_for(asyncio.gather(*waiters), 5)

    assert {operation.status for operation in done} == {Status.COMPLETED}
    # Each waiter reads its own result once; the looks in between are one per commit, for all waiters together.
    assert database.reads - before <= len(waiters) + 2 * 19


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


async def test_waiters_outlive_a_database_that_is_away_for_a_moment(bench: Bench) -> None:
    database = Counting(bench.database)
    operation = await bench.submit(await bench.open())
    async with Futures(database, bench.database.wakeups, lambda unit: unit.operations) as futures:
        waiter = asyncio.create_task(futures.wait(bench.project_id, operation.id, 60))
        while not database.reads:
            await asyncio.sleep(0)
        database.away = True
        await bench.open()  # wakes the watcher, which finds nobody
        while not database.refused:
            await asyncio.sleep(0)
        database.away = False
        await bench.run_one()

        assert (await asyncio.wait_for(waiter, 2)).status is Status.COMPLETED


class Counting:
    """A database that counts its reads and can be away."""

    def __init__(self, database: SqlDatabase) -> None:
        self._database = database
        self.reads = 0
        self.refused = 0
        self.away = False

    @asynccontextmanager
    async def read(self) -> AsyncIterator[UnitOfWork]:
        if self.away:
            self.refused += 1
            raise Unavailable("away")
        self.reads += 1
        async with self._database.read() as unit:
            yield unit

    @asynccontextmanager
    async def write(self) -> AsyncIterator[UnitOfWork]:
        async with self._database.write() as unit:
            yield unit
