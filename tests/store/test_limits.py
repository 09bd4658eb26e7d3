"""Limits on both databases: whose value counts, and that nobody gets more than there is, however many ask at once."""

import asyncio
from types import SimpleNamespace

import pytest

from gateway.core.ids import KeyId, ProjectId
from gateway.core.limits import Limit, LimitScope, QuotaFull, RateLimited
from gateway.core.ports import OwnLimit
from gateway.core.principals import ALL_SCOPES, Principal
from gateway.store import SqlDatabase
from gateway.wire import limits as limits_at_the_edge
from gateway.wire.limits import Limiter
from gateway.wire.metering import held, hold
from tests.store.bench import Bench


async def own(database: SqlDatabase, project: ProjectId, scope: LimitScope, id: str, limit: Limit, value: int) -> None:
    async with database.write() as unit:
        await unit.limits.set(OwnLimit(scope=scope, scope_id=id, project_id=project, limit=limit, value=value))


async def test_the_smaller_of_project_and_key_counts(database: SqlDatabase) -> None:
    async with database.write() as unit:
        project = await unit.keys.ensure_project("one")
    await own(database, project, LimitScope.PROJECT, project, Limit.SAMPLES, 8)
    await own(database, project, LimitScope.KEY, "k", Limit.SAMPLES, 4)
    await own(database, project, LimitScope.PROJECT, project, Limit.SAMPLES, 9)
    async with database.read() as unit:
        assert (await unit.limits.allowance(project, KeyId("k"))).limits == {Limit.SAMPLES: 4}
        assert (await unit.limits.allowance(project, KeyId("other"))).limits == {Limit.SAMPLES: 9}
        assert [one.value for one in await unit.limits.own(project)] == [4, 9]
    async with database.write() as unit:
        assert await unit.limits.remove(LimitScope.KEY, "k", Limit.SAMPLES)
        assert not await unit.limits.remove(LimitScope.KEY, "k", Limit.SAMPLES)


async def test_many_takers_share_one_bucket_exactly(database: SqlDatabase) -> None:
    async with database.write() as unit:
        project = await unit.keys.ensure_project("one")
    await own(database, project, LimitScope.PROJECT, project, Limit.REQUESTS, 50)

    async def take(key: str) -> int:
        async with database.write() as unit:
            return (await unit.limits.take(project, KeyId(key), Limit.REQUESTS, 3))[0]

    granted = await asyncio.gather(*(take(f"key-{number % 4}") for number in range(24)))
    assert sum(granted) == 50


async def test_what_calls_may_take_is_taken_before_and_given_back_after(database: SqlDatabase) -> None:
    async with database.write() as unit:
        project, key = await unit.keys.ensure_project("one"), KeyId("k")
    await own(database, project, LimitScope.PROJECT, project, Limit.TOKENS, 100)

    async def call() -> bool:
        try:
            await database.apply(lambda unit: unit.limits.reserve(project, key, 30))
        except RateLimited:
            return False
        return True

    assert sum(await asyncio.gather(*(call() for _ in range(10)))) == 3
    await database.apply(lambda unit: unit.limits.charge(project, key, 2 - 30))
    assert (await call(), await call()) == (True, False)


async def test_a_caller_that_leaves_before_its_tokens_were_taken_is_given_none(
    database: SqlDatabase, bench: Bench
) -> None:
    await own(database, bench.project_id, LimitScope.PROJECT, bench.project_id, Limit.TOKENS, 100)
    await database.apply(lambda unit: unit.limits.reserve(bench.project_id, bench.key_id, 100))
    call = bench.call(prompt=30, sampled=30)
    async with database.write():
        leaving = asyncio.create_task(hold(database, call))
        await asyncio.sleep(0)  # it asks, and nothing has begun for it yet
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
    with pytest.raises(RateLimited):
        await database.apply(lambda unit: unit.limits.reserve(bench.project_id, bench.key_id, 50))


async def test_a_call_that_fails_gives_its_tokens_back_though_its_caller_leaves_meanwhile(
    database: SqlDatabase, bench: Bench
) -> None:
    await own(database, bench.project_id, LimitScope.PROJECT, bench.project_id, Limit.TOKENS, 100)
    begun, fail = asyncio.Event(), asyncio.Event()

    async def fails() -> None:
        async with held(database, bench.call(prompt=30, sampled=30), bench.clock):
            begun.set()
            await fail.wait()
            raise ZeroDivisionError

    failing = asyncio.create_task(fails())
    await begun.wait()
    async with database.write():
        fail.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # it waits for its turn to give back
        failing.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await failing
    await database.apply(lambda unit: unit.limits.reserve(bench.project_id, bench.key_id, 100))


async def test_a_call_above_a_whole_minutes_tokens_takes_a_full_bucket_and_owes_the_rest(
    database: SqlDatabase,
) -> None:
    async with database.write() as unit:
        project, key = await unit.keys.ensure_project("one"), KeyId("k")
    await own(database, project, LimitScope.KEY, key, Limit.TOKENS, 10)

    await database.apply(lambda unit: unit.limits.reserve(project, key, 25))
    with pytest.raises(RateLimited):
        await database.apply(lambda unit: unit.limits.reserve(project, key, 1))
    allowance = await database.ask(lambda unit: unit.limits.allowance(project, key))
    bucket = allowance.narrowest(Limit.TOKENS)
    assert bucket is not None
    assert -15 <= bucket.left <= -14


async def test_a_limiter_takes_no_more_while_half_of_what_it_took_is_left(
    database: SqlDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with database.write() as unit:
        project, key = await unit.keys.ensure_project("one"), KeyId("k")
    await own(database, project, LimitScope.PROJECT, project, Limit.REQUESTS, 600)
    principal = Principal(project_id=project, key_id=key, scopes=ALL_SCOPES)
    now = 100.0
    monkeypatch.setattr(limits_at_the_edge, "time", SimpleNamespace(monotonic=lambda: now))
    limiter = Limiter(database)

    async def left_after(calls: int) -> int:
        nonlocal now
        for _ in range(calls):
            await limiter.admit(principal)
            now += 1.5
        bucket = (await database.ask(lambda unit: unit.limits.allowance(project, key))).narrowest(Limit.REQUESTS)
        assert bucket is not None
        return bucket.left

    assert await left_after(5) == 590  # a second's worth is 10: taken once
    assert await left_after(1) == 585  # 5 of them were left: filled up
    now += 10
    assert await left_after(1) == 575  # 9 of them, and long ago: given up


async def test_a_limiter_forgets_the_keys_that_nobody_uses(database: SqlDatabase) -> None:
    async with database.write() as unit:
        project = await unit.keys.ensure_project("one")
    forgetful, limiter = Limiter(database, most=3, kept_s=0), Limiter(database, most=3)
    for number in range(8):
        principal = Principal(project_id=project, key_id=KeyId(f"k{number}"), scopes=ALL_SCOPES)
        await forgetful.admit(principal)
        await limiter.admit(principal)

    assert len(forgetful) <= 3
    assert len(limiter) == 8, "a key that is in use is remembered"


async def test_the_last_session_is_opened_once(database: SqlDatabase, bench: Bench) -> None:
    project = bench.project_id
    await own(database, project, LimitScope.PROJECT, project, Limit.SESSIONS, 3)
    opened = await asyncio.gather(*(bench.open() for _ in range(6)), return_exceptions=True)
    refused = [one for one in opened if isinstance(one, QuotaFull)]
    assert (len(opened) - len(refused), len(refused)) == (3, 3)


@pytest.mark.parametrize("limit", [Limit.QUEUE, Limit.VERSIONS, Limit.STORED])
async def test_what_is_not_there_counts_nothing(database: SqlDatabase, limit: Limit) -> None:
    async with database.write() as unit:
        project = await unit.keys.ensure_project("one")
    await own(database, project, LimitScope.KEY, "k", limit, 1)
    async with database.write() as unit:
        await unit.limits.require_room(project, KeyId("k"), limit)
        with pytest.raises(QuotaFull):
            await unit.limits.require_room(project, KeyId("k"), limit, more=2)
