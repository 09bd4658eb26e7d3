"""Sessions: names, pages, stop, expiry, gaps."""

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest

from gateway.core.errors import Conflict, Invalid, NotFound, Unavailable
from gateway.core.operations import Status
from gateway.core.payloads import OperationKind, OptimStep, SaveWeights
from gateway.core.results import Failure
from gateway.core.sessions import Activity, OrderRule, Session, SessionStatus
from gateway.store import SqlDatabase
from gateway.store.lora import lora_columns, lora_of
from tests.store.bench import (
    LEASE_S,
    LORA,
    REPORT,
    Bench,
    HandClock,
    forward_backward,
    forward_result,
    new_session,
    open_bench,
)


async def test_a_session_comes_back_as_it_was_added(bench: Bench) -> None:
    now = bench.clock.now()
    session = new_session(
        bench.project_id,
        bench.key_id,
        now,
        name="Ünïcode 名",
        ttl_s=60,
        expires_at=now + timedelta(seconds=60),
        user_metadata={"team": "α", "run": ""},
        lora=replace(LORA, use_rslora=True),
    )
    async with bench.database.write() as unit:
        await unit.sessions.add(session, idempotency_key="k", request_digest="d1")

    async with bench.database.read() as unit:
        assert await unit.sessions.get(bench.project_id, session.id) == session
        assert await unit.sessions.by_name(bench.project_id, "Ünïcode 名") == session
        assert await unit.sessions.by_idempotency_key(bench.project_id, "k") == (session, "d1")
        assert await unit.sessions.by_idempotency_key(bench.project_id, "other") is None


async def test_a_sessions_idempotency_key_is_its_projects_for_a_day(bench: Bench, database: SqlDatabase) -> None:
    stranger = await open_bench(database, bench.clock, "stranger")

    async def opened(by: Bench) -> Session:
        session = new_session(by.project_id, by.key_id, bench.clock.now())
        async with database.write() as unit:
            await unit.sessions.add(session, idempotency_key="k", request_digest="d")
        return session

    async def known(by: Bench) -> Session | None:
        async with database.read() as unit:
            found = await unit.sessions.by_idempotency_key(by.project_id, "k")
        return None if found is None else found[0]

    first, theirs = await opened(bench), await opened(stranger)
    assert [await known(bench), await known(stranger)] == [first, theirs]
    bench.clock.advance(24 * 3600 - 1)
    assert await known(bench) == first
    with pytest.raises(Unavailable) as taken:
        await opened(bench)
    assert taken.value.code == "request_in_progress"
    bench.clock.advance(1)
    assert await known(bench) is None
    second = await opened(bench)
    assert await known(bench) == second != first


def test_a_row_from_before_rslora_has_the_plain_scale() -> None:
    row = {**lora_columns(LORA), "lora_use_rslora": None}

    assert lora_of(row) == LORA  # pyright: ignore[reportArgumentType]


async def test_racing_sessions_of_one_name_leave_one(bench: Bench) -> None:
    outcomes = await asyncio.gather(*(bench.open(name="mine") for _ in range(8)), return_exceptions=True)

    conflicts = [outcome for outcome in outcomes if isinstance(outcome, Conflict)]
    assert len(conflicts) == 7
    assert {(conflict.code, conflict.field) for conflict in conflicts} == {("session_name_taken", "name")}


async def test_a_name_is_free_again_after_a_stop_and_names_the_live_session(bench: Bench) -> None:
    first = await bench.open(name="mine")
    async with bench.database.write() as unit:
        await unit.sessions.stop(first.project_id, first.id, bench.clock.now())
    second = await bench.open(name="mine")

    async with bench.database.read() as unit:
        found = await unit.sessions.by_name(bench.project_id, "mine")
    assert found is not None
    assert found.id == second.id


async def test_two_projects_may_use_one_name(database: SqlDatabase, bench: Bench, clock: HandClock) -> None:
    other = await open_bench(database, clock, "other")

    mine, theirs = await bench.open(name="same"), await other.open(name="same")

    async with database.read() as unit:
        found = await unit.sessions.by_name(other.project_id, "same")
    assert found is not None
    assert (found.id, mine.id != theirs.id) == (theirs.id, True)


@pytest.mark.parametrize("text", ["a\x00b", "\ud800"])
async def test_text_that_no_database_holds_is_refused_by_field(bench: Bench, text: str) -> None:
    with pytest.raises(Invalid) as refused:
        await bench.open(name=text)
    assert refused.value.field == "name"
    with pytest.raises(Invalid) as refused:
        await bench.open(user_metadata={"label": text})
    assert refused.value.field == "user_metadata"


async def test_pages_are_newest_first_and_cover_everything_once(bench: Bench) -> None:
    opened: list[str] = []
    for index in range(7):
        if index != 3:  # two sessions of the same moment
            bench.clock.advance(1)
        opened.append((await bench.open()).id)

    pages: list[str] = []
    after = None
    async with bench.database.read() as unit:
        while page := await unit.sessions.page(bench.project_id, limit=3, after=after):
            pages += [session.id for session in page]
            after = page[-1].id

    assert sorted(pages) == sorted(opened)
    assert (pages[0], pages[-1]) == (opened[-1], opened[0])


async def test_stopping_an_idle_session_skips_its_queue_at_once(bench: Bench) -> None:
    session = await bench.open()
    waiting = [await bench.submit(session, seq=seq) for seq in (2, 3)]

    async with bench.database.write() as unit:
        stopped = await unit.sessions.stop(session.project_id, session.id, bench.clock.now())
    async with bench.database.write() as unit:
        again = await unit.sessions.stop(session.project_id, session.id, bench.clock.advance(1))

    assert (stopped.status, stopped.activity) == (SessionStatus.STOPPED, Activity.IDLE)
    assert again == stopped
    for operation in waiting:
        skipped = await bench.operation(operation.id)
        assert (skipped.status, skipped.outcome, skipped.waits_for_seq) == (Status.SKIPPED, None, None)
        assert skipped.finished_at is not None


async def test_a_stopping_session_stops_when_its_running_operation_ends(bench: Bench) -> None:
    session = await bench.open()
    operations = [await bench.submit(session) for _ in range(2)]
    work = await bench.claimed()

    async with bench.database.write() as unit:
        stopping = await unit.sessions.stop(session.project_id, session.id, bench.clock.now())
    await bench.finish(work)

    assert stopping.status is SessionStatus.STOPPING
    assert (await bench.session(session)).status is SessionStatus.STOPPED
    assert [(await bench.operation(operation.id)).status for operation in operations] == [
        Status.COMPLETED,
        Status.SKIPPED,
    ]


async def test_a_stopping_session_still_recovers_its_running_operation(bench: Bench) -> None:
    session = await bench.open()
    await bench.submit(session)
    await bench.claimed("trainer-a")
    async with bench.database.write() as unit:
        await unit.sessions.stop(session.project_id, session.id, bench.clock.now())
    bench.clock.advance(LEASE_S)

    await bench.finish(await bench.claimed("trainer-b"))

    assert (await bench.session(session)).status is SessionStatus.STOPPED


async def test_a_stopping_session_waits_for_the_publish_gate(bench: Bench) -> None:
    session = await bench.open()
    saved = await bench.save(session)
    async with bench.database.write() as unit:
        stopping = await unit.sessions.stop(session.project_id, session.id, bench.clock.now())
    async with bench.database.write() as unit:
        await unit.versions.publish(saved.version_id, REPORT, at=bench.clock.now())

    now = await bench.session(session)
    assert (stopping.status, now.status) == (SessionStatus.STOPPING, SessionStatus.STOPPED)
    assert now.latest_version_id == saved.version_id


async def test_a_strangers_session_cannot_be_stopped(database: SqlDatabase, bench: Bench, clock: HandClock) -> None:
    stranger = await open_bench(database, clock, "other")
    session = await bench.open()

    async with database.write() as unit:
        with pytest.raises(NotFound):
            await unit.sessions.stop(stranger.project_id, session.id, clock.now())
    assert (await bench.session(session)).status is SessionStatus.CREATING


async def test_an_idle_session_expires_and_skips_its_queue(bench: Bench) -> None:
    now = bench.clock.now()
    session = await bench.open(ttl_s=60, expires_at=now + timedelta(seconds=60))
    forever = await bench.open()
    waiting = await bench.submit(session, seq=2)

    async with bench.database.write() as unit:
        early = await unit.sessions.expire_due(bench.clock.advance(59.999))
        due = await unit.sessions.expire_due(bench.clock.advance(0.001))
        again = await unit.sessions.expire_due(bench.clock.advance(1))

    assert (early, due, again) == ([], [session.id], [])
    assert (await bench.session(session)).status is SessionStatus.EXPIRED
    assert (await bench.operation(waiting.id)).status is Status.SKIPPED
    assert (await bench.session(forever)).status is SessionStatus.CREATING


async def test_use_puts_expiry_off(bench: Bench) -> None:
    now = bench.clock.now()
    session = await bench.open(ttl_s=60, expires_at=now + timedelta(seconds=60))
    bench.clock.advance(50)
    async with bench.database.write() as unit:
        await unit.sessions.touch(session.id, bench.clock.now())

    used = await bench.session(session)
    assert (used.last_used_at, used.expires_at) == (bench.clock.now(), bench.clock.now() + timedelta(seconds=60))

    bench.clock.advance(50)
    await bench.submit(session)
    assert (await bench.session(session)).last_used_at == bench.clock.now()


async def test_a_session_whose_operation_runs_does_not_expire(bench: Bench) -> None:
    session = await bench.open(ttl_s=60, expires_at=bench.clock.now() + timedelta(seconds=60))
    await bench.submit(session)
    work = await bench.claimed()
    bench.clock.advance(3600)
    async with bench.database.write() as unit:
        assert await unit.sessions.expire_due(bench.clock.now()) == []
    await bench.finish(work)

    assert (await bench.session(session)).expires_at == bench.clock.now() + timedelta(seconds=60)


async def fail_gaps(bench: Bench, waited_s: float) -> list[str]:
    async with bench.database.write() as unit:
        return list(await unit.operations.fail_gaps(older_than=bench.clock.now() - timedelta(seconds=waited_s)))


async def test_a_gap_that_never_fills_fails_what_waits_and_names_the_seq(bench: Bench) -> None:
    session = await bench.open()
    old = [await bench.submit(session, forward_backward(), seq=seq) for seq in (2, 3)]
    bench.clock.advance(50)
    young = await bench.submit(session, OptimStep(), seq=4)
    bench.clock.advance(10)

    assert await fail_gaps(bench, 60) == []
    bench.clock.advance(0.001)
    assert await fail_gaps(bench, 60) == [operation.id for operation in old]

    for operation in old:
        failed = await bench.operation(operation.id)
        assert isinstance(failed.outcome, Failure)
        assert (failed.status, failed.outcome.code, failed.outcome.details) == (
            Status.FAILED,
            "sequence_gap",
            {"missing_seq": 1},
        )
    now = await bench.session(session)
    assert (now.applied_seq, now.window_broken_by) == (3, 1)
    with pytest.raises(Conflict) as late:
        await bench.submit(session, forward_backward(), seq=1)
    assert late.value.code == "sequence_passed"
    assert (await bench.claimed()).operation.id == young.id


async def test_a_step_that_fails_in_a_gap_ends_the_window(bench: Bench) -> None:
    session = await bench.open()
    await bench.submit(session, forward_backward(), seq=1)
    await bench.run_one(outcome=forward_result())
    await bench.submit(session, OptimStep(), seq=3)
    bench.clock.advance(61)
    assert len(await fail_gaps(bench, 60)) == 1

    now = await bench.session(session)
    async with bench.database.read() as unit:
        replayed = await unit.work.completed_after(session.id, 0)
    assert (now.applied_seq, now.window_broken_by, replayed) == (3, None, [])


async def test_each_gap_is_given_up_on_its_own(bench: Bench) -> None:
    session = await bench.open()
    await bench.submit(session, seq=5)
    bench.clock.advance(100)
    second = await bench.submit(session, seq=2)

    assert await fail_gaps(bench, 60) == []
    assert (await bench.session(session)).applied_seq == 1
    assert (await bench.run_one()).id == second.id
    assert len(await fail_gaps(bench, 60)) == 1
    assert (await bench.session(session)).applied_seq == 5


async def test_operations_without_a_gap_may_wait_for_ever(bench: Bench) -> None:
    strict, ascending = await bench.open(), await bench.open(order=OrderRule.ASCENDING)
    await bench.submit(strict, seq=1)
    await bench.submit(ascending, seq=7)
    bench.clock.advance(1000)

    assert await fail_gaps(bench, 60) == []


async def test_a_gap_behind_a_running_operation_is_not_given_up_before_its_turn(bench: Bench) -> None:
    session = await bench.open()
    await bench.submit(session, seq=1)
    await bench.submit(session, seq=3)
    work = await bench.claimed()
    bench.clock.advance(1000)

    assert await fail_gaps(bench, 60) == []
    await bench.finish(work)
    assert len(await fail_gaps(bench, 60)) == 1


async def test_activity_tells_work_from_idleness(bench: Bench) -> None:
    session = await bench.open()
    seen = [(await bench.session(session)).activity]
    await bench.submit(session, SaveWeights(group="policy"))
    seen.append((await bench.session(session)).activity)
    work = await bench.claimed()
    seen.append((await bench.session(session)).activity)
    await bench.stage(work, complete=True)
    seen.append((await bench.session(session)).activity)

    assert seen == [Activity.IDLE, Activity.ACTIVE, Activity.ACTIVE, Activity.IDLE]


async def test_a_removed_session_is_in_no_list_gives_its_name_away_and_keeps_its_row(bench: Bench) -> None:
    session = await bench.open(name="gone")
    async with bench.database.write() as unit:
        with pytest.raises(Conflict, match="stop it first"):
            await unit.sessions.remove(bench.project_id, session.id, bench.clock.now())
        await unit.sessions.stop(bench.project_id, session.id, bench.clock.now())
        await unit.sessions.remove(bench.project_id, session.id, bench.clock.now())
        await unit.sessions.remove(bench.project_id, session.id, bench.clock.now() + timedelta(hours=1))
        assert await unit.sessions.by_name(bench.project_id, "gone") is None
        assert await unit.sessions.count(bench.project_id) == 0
        assert list(await unit.sessions.page(bench.project_id, limit=10, after=None)) == []
        assert (await unit.sessions.get(bench.project_id, session.id)).removed_at == bench.clock.now()


@pytest.mark.parametrize(("kind", "broken"), [(OperationKind.FORWARD_BACKWARD, 3), (OperationKind.OPTIM_STEP, None)])
async def test_a_refused_gradient_behind_a_hole_leaves_the_window_incomplete(
    bench: Bench, kind: OperationKind, broken: int | None
) -> None:
    """1 runs, 2 was never sent, 3 was refused, 4 is the step."""
    session = await bench.open(order=OrderRule.ASCENDING)
    await bench.submit(session, forward_backward(), seq=1)
    await bench.run_one(outcome=forward_result())
    async with bench.database.write() as unit:
        await unit.operations.refuse(session, bench.key_id, 3, kind)
    await bench.submit(session, OptimStep(), seq=4)
    work = await bench.claimed()
    assert (work.operation.seq, work.session.window_broken_by) == (4, broken)
    await bench.finish(work)
    assert (await bench.session(session)).window_broken_by is None
