"""Sampling that outlives its request: what was computed is stored and paid for, whenever its client gives it up."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import make_url, select

from billing.tables import holds, lost_calls
from gateway.core.futures import Futures
from gateway.core.ids import SampleId
from gateway.core.results import Failure
from gateway.core.sampling import TokenCounts
from gateway.core.usage import Meter
from gateway.store import writer
from gateway.wire import insisting, sampling_jobs
from gateway.wire.metering import held
from gateway.wire.sampling_jobs import Answer, Answered, SamplingJobs
from tests.billing.books import OWNER, Books
from tests.billing.conftest import books, clock, postgres, shared_postgres_url, sqlite_template, sqlite_url
from tests.engines.fixtures import until

__all__ = ["books", "clock", "postgres", "shared_postgres_url", "sqlite_template", "sqlite_url"]

COUNTS = TokenCounts(engine="e", prompt=3, cached=0, sampled=5)


@pytest.fixture
def url(sqlite_url: str) -> str:
    return sqlite_url


@pytest.fixture
async def jobs(books: Books) -> AsyncIterator[SamplingJobs]:
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
    assert await books.look(lambda c: list(c.execute(select(lost_calls.c.source)).scalars())) == [ids[1]]
