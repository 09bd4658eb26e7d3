"""Scores in the store: one per key, handed out fairly, computed once, readable for a day."""

import asyncio
from datetime import timedelta

import pytest

from gateway.core.errors import Conflict, Kind, NotFound
from gateway.core.ids import ProjectId, ScoreId, VersionId
from gateway.core.operations import Status
from gateway.core.ports import ScoreWork, StaleLease
from gateway.core.results import Failure
from gateway.core.scores import KEPT, Score, ScoreOutcome, ScoreRequest, ScoreResult, score_targets
from gateway.core.tensors import TensorData
from gateway.core.usage import Meter, UsageFact
from gateway.store import SqlDatabase
from tests.store.bench import BASE, LEASE_S, MODEL, Bench, open_bench

RESULT = ScoreResult(logprobs=TensorData.floats([-1.5, -0.25]))
DAY_S = KEPT / timedelta(seconds=1)


def request(first: int = 1, version_id: VersionId | None = None) -> ScoreRequest:
    return score_targets(MODEL, version_id, [first, first + 1], [first + 1, first + 2], temperature=0.5)


async def ask(
    bench: Bench, score_request: ScoreRequest | None = None, *, key: str | None = None, digest: str = "d"
) -> Score:
    async with bench.database.write() as unit:
        return await unit.scores.add(
            score_request or request(),
            project_id=bench.project_id,
            key_id=bench.key_id,
            session_id=None,
            idempotency_key=key,
            request_digest=digest,
        )


async def read(bench: Bench, score: Score) -> Score:
    async with bench.database.read() as unit:
        return await unit.scores.get(bench.project_id, score.id)


async def claim(bench: Bench, owner: str = "trainer-a", *, base_model: str = BASE) -> ScoreWork | None:
    async with bench.database.write() as unit:
        return await unit.score_work.claim(owner=owner, base_model=base_model, lease_s=LEASE_S, at=bench.clock.now())


async def claimed(bench: Bench, owner: str = "trainer-a") -> ScoreWork:
    work = await claim(bench, owner)
    assert work is not None
    return work


async def finish(bench: Bench, work: ScoreWork, outcome: ScoreOutcome = RESULT, *facts: UsageFact) -> None:
    async with bench.database.write() as unit:
        await unit.score_work.finish(work, outcome, facts=facts, at=bench.clock.now())


async def waiting(bench: Bench, base_model: str = BASE) -> bool:
    async with bench.database.read() as unit:
        return await unit.score_work.waiting(base_model=base_model, at=bench.clock.now())


async def test_a_score_is_computed_and_read_back_with_its_usage(bench: Bench) -> None:
    score = await ask(bench)
    work = await claimed(bench)
    assert (work.score.id, work.request, work.version, work.attempts) == (score.id, request(), None, 1)
    assert (await read(bench, score)).status is Status.RUNNING

    await finish(bench, work, RESULT, bench.fact(score.id, 2, Meter.PREFILL))

    done = await read(bench, score)
    assert (done.status, done.outcome, done.final) == (Status.COMPLETED, RESULT, True)
    async with bench.database.read() as unit:
        assert [(fact.meter, fact.quantity) for fact in await unit.usage.of_source(score.id)] == [(Meter.PREFILL, 2)]
        assert await unit.scores.final_among([score.id, ScoreId("scr-other")]) == [score.id]
    assert await claim(bench) is None


async def test_a_failure_is_kept_like_a_result(bench: Bench) -> None:
    failure = Failure(kind=Kind.NOT_FOUND, code="unknown_version", message="gone", field="version", details={"n": 1})
    score = await ask(bench)
    await finish(bench, await claimed(bench), failure)

    done = await read(bench, score)
    assert (done.status, done.outcome) == (Status.FAILED, failure)


async def test_the_claim_carries_the_version_and_a_missing_one_is_none(bench: Bench) -> None:
    saved = await bench.save(await bench.open(), complete=True)
    await ask(bench, request(version_id=saved.version_id))
    await ask(bench, request(version_id=VersionId("ver-gone")))

    works = [await claimed(bench) for _ in range(2)]

    assert [work.version.id if work.version else None for work in works] == [saved.version_id, None]
    assert [work.request.version_id for work in works] == [saved.version_id, "ver-gone"]


async def test_one_key_is_one_score_whoever_races(bench: Bench) -> None:
    found = await asyncio.gather(*(ask(bench, key="once") for _ in range(8)))
    assert len({score.id for score in found}) == 1

    with pytest.raises(Conflict) as refused:
        await ask(bench, request(7), key="once", digest="other")
    assert refused.value.code == "idempotency_key_reused"
    async with bench.database.read() as unit:
        known = await unit.scores.by_idempotency_key(bench.project_id, "once")
    assert known is not None
    assert known.id == found[0].id
    assert (await ask(bench)).id != (await ask(bench)).id, "without a key every request is another one"


async def test_a_stranger_finds_nothing(bench: Bench, database: SqlDatabase) -> None:
    score = await ask(bench, key="mine")
    stranger = await open_bench(database, bench.clock, "stranger")
    with pytest.raises(NotFound):
        await read(stranger, score)
    async with database.read() as unit:
        assert await unit.scores.by_idempotency_key(stranger.project_id, "mine") is None
    assert (await ask(stranger, key="mine")).id != score.id


async def test_a_trainer_gets_scores_of_its_base_model_only(bench: Bench) -> None:
    await ask(bench)
    assert not await waiting(bench, "other")
    assert await claim(bench, base_model="other") is None
    assert await waiting(bench)


async def test_a_long_queue_of_one_project_does_not_hold_up_another(bench: Bench, database: SqlDatabase) -> None:
    for first in range(1, 9):
        await ask(bench, request(first))
        bench.clock.advance(1)
    other = await open_bench(database, bench.clock, "other")
    late = await ask(other)

    served: list[ProjectId] = []
    for _ in range(3):
        bench.clock.advance(1)
        work = await claimed(bench)
        served.append(work.score.project_id)
        await finish(bench, work)

    assert served == [bench.project_id, other.project_id, bench.project_id]
    assert (await read(other, late)).status is Status.COMPLETED


async def test_racing_trainers_never_compute_the_same_score(bench: Bench) -> None:
    asked = {(await ask(bench, request(first))).id for first in range(1, 7)}

    works = await asyncio.gather(*(claim(bench, f"trainer-{index}") for index in range(6)))

    got = [work.score.id for work in works if work is not None]
    assert len(got) == len(set(got))
    rest = [await claim(bench) for _ in range(6 - len(got))]
    assert {*got, *(work.score.id for work in rest if work is not None)} == asked


async def test_a_lost_trainers_score_is_handed_out_again_and_the_loser_writes_nothing(bench: Bench) -> None:
    score = await ask(bench)
    lost = await claimed(bench, "trainer-a")
    assert await claim(bench, "trainer-b") is None

    bench.clock.advance(LEASE_S)
    again = await claimed(bench, "trainer-b")
    assert (again.score.id, again.attempts) == (score.id, 2)
    with pytest.raises(StaleLease):
        await finish(bench, lost, RESULT, bench.fact(score.id, 2, Meter.PREFILL))
    await finish(bench, again)

    with pytest.raises(StaleLease):
        await finish(bench, lost, RESULT, bench.fact(score.id, 2, Meter.PREFILL))
    async with bench.database.read() as unit:
        assert await unit.usage.of_source(score.id) == []


async def test_a_trainer_that_took_its_own_score_again_is_fenced_by_the_count(bench: Bench) -> None:
    await ask(bench)
    first = await claimed(bench)
    bench.clock.advance(LEASE_S)
    await claimed(bench)
    with pytest.raises(StaleLease):
        await finish(bench, first)


async def test_a_renewed_lease_holds_and_one_that_ran_out_is_not_renewed(bench: Bench) -> None:
    await ask(bench)
    await claimed(bench)
    for _ in range(3):
        bench.clock.advance(LEASE_S - 1)
        async with bench.database.write() as unit:
            await unit.score_work.renew(owner="trainer-a", lease_s=LEASE_S, at=bench.clock.now())
    assert await claim(bench, "trainer-b") is None

    bench.clock.advance(LEASE_S)
    async with bench.database.write() as unit:
        await unit.score_work.renew(owner="trainer-a", lease_s=LEASE_S, at=bench.clock.now())
    assert await claim(bench, "trainer-b") is not None


async def test_a_report_sent_twice_is_taken_once(bench: Bench) -> None:
    score = await ask(bench)
    work = await claimed(bench)
    for _ in range(2):
        await finish(bench, work, RESULT, bench.fact(score.id, 2, Meter.PREFILL))

    async with bench.database.read() as unit:
        assert [fact.quantity for fact in await unit.usage.of_source(score.id)] == [2]


async def test_a_cancelled_score_is_not_handed_out_and_a_running_one_goes_on(bench: Bench) -> None:
    running, queued = await ask(bench), await ask(bench)
    work = await claimed(bench)
    async with bench.database.write() as unit:
        for score in (running, queued):
            await unit.scores.cancel(score.id)

    assert (await read(bench, queued)).status is Status.CANCELLED
    assert await claim(bench) is None
    await finish(bench, work)
    assert (await read(bench, running)).status is Status.COMPLETED


async def test_a_score_is_readable_for_a_day_and_its_key_is_free_again_then(bench: Bench) -> None:
    score = await ask(bench, key="daily")
    await finish(bench, await claimed(bench))
    bench.clock.advance(DAY_S - 1)
    assert (await ask(bench, key="daily")).id == score.id

    bench.clock.advance(1)
    with pytest.raises(NotFound):
        await read(bench, score)
    renewed = await ask(bench, request(3), key="daily", digest="tomorrow")
    assert renewed.id != score.id


async def test_what_is_too_old_to_be_read_is_neither_computed_nor_kept(bench: Bench) -> None:
    await ask(bench)
    bench.clock.advance(DAY_S)
    fresh = await ask(bench)
    assert (await claimed(bench)).score.id == fresh.id
    assert await claim(bench) is None
    async with bench.database.write() as unit:
        assert await unit.scores.forget(bench.clock.now()) == 1
        assert await unit.scores.forget(bench.clock.now()) == 0
    assert (await read(bench, fresh)).status is Status.RUNNING


async def test_asking_and_finishing_wake_those_who_wait(bench: Bench) -> None:
    seen = await bench.database.wakeups.wait(-1, 0.0)
    await ask(bench)
    asked = await bench.database.wakeups.wait(seen, 5.0)
    work = await claimed(bench)
    await finish(bench, work)
    assert seen < asked < await bench.database.wakeups.wait(asked, 5.0)
