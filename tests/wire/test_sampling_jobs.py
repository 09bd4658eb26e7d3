"""Sampling that outlives its request: what was computed is stored and paid for, whenever its client gives it up; what
was told to be lost is neither."""

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest
from sqlalchemy import make_url, select

from billing.tables import holds, lost_calls
from gateway.core.futures import Futures
from gateway.core.ids import SampleId, new_sample_id
from gateway.core.ports import RunningSample
from gateway.core.results import Failure
from gateway.core.sampling import TokenCounts
from gateway.core.usage import Meter
from gateway.store import writer
from gateway.store.client_tables import running_samples
from gateway.store.samples import SqlSampleStore
from gateway.wire import insisting, sampling_jobs
from gateway.wire.metering import held
from gateway.wire.sampling_jobs import Answer, Answered, SamplingJobs
from tests.billing.books import OWNER, Books
from tests.billing.conftest import (
    books,
    clock,
    postgres,
    postgres_url,
    shared_postgres_url,
    sqlite_template,
    sqlite_url,
    url,
)
from tests.engines.fixtures import until

__all__ = ["books", "clock", "postgres", "postgres_url", "shared_postgres_url", "sqlite_template", "sqlite_url", "url"]

COUNTS = TokenCounts(engine="e", prompt=3, cached=0, sampled=5)


@pytest.fixture
async def jobs(books: Books) -> AsyncIterator[SamplingJobs]:
    async with running_jobs(books) as jobs:
        yield jobs


@asynccontextmanager
async def running_jobs(books: Books) -> AsyncGenerator[SamplingJobs]:
    async with (
        Futures(books.database, books.database.wakeups, lambda unit: unit.samples) as futures,
        SamplingJobs(books.database, futures, books.clock, OWNER, limit=4) as jobs,
    ):
        yield jobs


class Work:
    """An engine's call that ends when told to."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self.begun, self.end, self.over = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def __call__(self, sample_id: SampleId) -> Answered:
        call = self._books.bench.call(prompt=3, sampled=9, sample_id=sample_id)
        async with held(self._books.database, call, self._books.clock):
            self.begun.set()
            await self.end.wait()
        self.over.set()
        facts = call.facts(COUNTS, self._books.clock.now())
        return Answered(content=b"answer", headers={}, call=call, facts=facts)


async def declare_lost(books: Books) -> None:
    async with books.database.write() as unit:
        await unit.samples.lose(expired_by=books.clock.now())


async def until_renewed(books: Books, sample_id: SampleId) -> None:
    """Return when the lease is a whole one, by the clock that stands still."""
    lease = select(running_samples.c.lease_until).where(running_samples.c.id == sample_id)
    whole = books.clock.now() + timedelta(seconds=sampling_jobs.LEASE_S)

    async def is_renewed() -> bool:
        return await books.look(lambda c: c.execute(lease).scalar_one()) == whole

    await until(is_renewed)


async def written_off(books: Books) -> list[str]:
    return await books.look(lambda c: list(c.execute(select(lost_calls.c.source)).scalars()))


async def open_holds(books: Books) -> list[str]:
    """Return the calls that something is held for."""
    return await books.look(lambda c: list(c.execute(select(holds.c.source)).scalars()))


async def test_a_sample_that_is_given_up_while_its_answer_is_being_stored_keeps_it_and_is_paid_for(
    books: Books, jobs: SamplingJobs
) -> None:
    work = Work(books)
    sample_id = await jobs.start(books.project_id, "key", "digest", work)
    await work.begun.wait()
    async with books.database.write():  # nothing else is stored meanwhile
        work.end.set()
        await work.over.wait()
        await asyncio.sleep(0)
        jobs.cancel(sample_id)
    answer = await jobs.wait(books.project_id, sample_id, 10)
    facts = await books.database.ask(lambda unit: unit.usage.of_source(sample_id))

    assert isinstance(answer, Answer)
    assert answer.content == b"answer"
    assert {fact.meter: fact.quantity for fact in facts} == {Meter.PREFILL: 3, Meter.SAMPLE: 5}
    await books.post_all()
    assert await open_holds(books) == []


async def test_a_sample_that_is_given_up_while_it_is_computed_says_so_and_holds_nothing(
    books: Books, jobs: SamplingJobs
) -> None:
    for begun in (True, False):
        work = Work(books)
        sample_id = await jobs.start(books.project_id, f"key-{begun}", "digest", work)
        if begun:
            await work.begun.wait()
        jobs.cancel(sample_id)
        answer = await jobs.wait(books.project_id, sample_id, 10)

        assert isinstance(answer, Failure)
        assert answer.code == "sample_cancelled"
        assert await open_holds(books) == []


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)  # whose lock can be held from here
async def test_what_ends_while_the_database_is_away_is_stored_paid_for_and_released_once_it_is_back(
    books: Books, jobs: SamplingJobs, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "LOCK_TIMEOUT_S", 0.05)
    for module in (insisting, sampling_jobs):
        monkeypatch.setattr(module, "RETRY_S", 0.05)
    ended, cancelled = Work(books), Work(books)
    ids = [await jobs.start(books.project_id, key, "digest", work) for key, work in (("e", ended), ("c", cancelled))]
    await ended.begun.wait()
    await cancelled.begun.wait()
    other = sqlite3.connect(str(make_url(sqlite_url).database), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    ended.end.set()
    jobs.cancel(ids[1])

    async def something_is_owed() -> bool:
        return bool(insisting._owed)  # pyright: ignore[reportPrivateUsage]

    async def nothing_is_held() -> bool:
        await books.post_all()
        return await open_holds(books) == []

    await until(something_is_owed)
    other.close()
    answer, failure = [await jobs.wait(books.project_id, id, 10) for id in ids]

    assert isinstance(answer, Answer)
    assert isinstance(failure, Failure)
    await until(nothing_is_held)
    facts = [await books.database.ask(lambda unit, id=id: unit.usage.of_source(id)) for id in ids]
    assert [sum(fact.quantity for fact in each) for each in facts] == [8, 0]
    assert await written_off(books) == [ids[1]]


async def test_an_answer_that_comes_after_its_loss_was_told_is_neither_stored_nor_billed(
    books: Books, jobs: SamplingJobs
) -> None:
    work = Work(books)
    sample_id = await jobs.start(books.project_id, "key", "digest", work)
    await work.begun.wait()
    books.clock.advance(sampling_jobs.LEASE_S)
    before = await jobs.wait(books.project_id, sample_id, 0)
    await declare_lost(books)
    told = await jobs.wait(books.project_id, sample_id, 10)
    work.end.set()

    async def is_written_off() -> bool:
        return await written_off(books) == [sample_id]

    await until(is_written_off)
    await books.post_all()
    assert before is None
    assert isinstance(told, Failure)
    assert told.code == "sample_lost"
    assert await jobs.wait(books.project_id, sample_id, 0) == told
    assert await books.database.ask(lambda unit: unit.usage.of_source(sample_id)) == []
    assert await open_holds(books) == []


async def test_a_sample_whose_beginning_its_gateway_never_heard_of_is_lost_though_others_run_there(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_jobs, "RENEW_S", 0.01)
    begun = RunningSample(id=new_sample_id(), key="key", request_digest="digest", owner=OWNER)
    async with running_jobs(books) as jobs:
        other = Work(books)
        other_id = await jobs.start(books.project_id, "other", "digest", other)
        await other.begun.wait()
        async with books.database.write() as unit:  # the reply to this commit never came
            await unit.samples.begin(books.project_id, begun, lease_s=sampling_jobs.LEASE_S)
        assert await jobs.start(books.project_id, "key", "digest", Work(books)) == begun.id
        books.clock.advance(sampling_jobs.LEASE_S)
        await until_renewed(books, other_id)
        await declare_lost(books)
        told = await jobs.wait(books.project_id, begun.id, 10)
        assert isinstance(told, Failure)
        assert told.code == "sample_lost"
        other.end.set()
        assert isinstance(await jobs.wait(books.project_id, other_id, 10), Answer)


async def test_a_renewal_that_fails_is_not_the_last(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_jobs, "RENEW_S", 0.01)
    failed = asyncio.Event()

    async def fail(*_: object, **__: object) -> None:
        failed.set()
        raise RuntimeError("a defect of ours")

    async with running_jobs(books) as jobs:
        work = Work(books)
        with monkeypatch.context() as broken:
            broken.setattr(SqlSampleStore, "renew", fail)
            sample_id = await jobs.start(books.project_id, "key", "digest", work)
            await failed.wait()
        books.clock.advance(1)
        await until_renewed(books, sample_id)
        work.end.set()
        assert isinstance(await jobs.wait(books.project_id, sample_id, 10), Answer)
