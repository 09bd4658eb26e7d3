"""The trainer's side: who gets which operation, and who may write its result."""

import asyncio

import pytest

from gateway.core.errors import Kind
from gateway.core.operations import Status
from gateway.core.payloads import OptimStep, SaveWeights
from gateway.core.ports import Lease, StaleLease, Work
from gateway.core.results import Failure, LoadStateResult, OptimStepResult
from gateway.core.sessions import Activity, ComputeRules, OrderRule, Recovery, SessionStatus, Snapshot
from gateway.core.versions import VersionFilter
from gateway.store import SqlDatabase
from tests.store.bench import BASE, LEASE_S, RULES, Bench, forward_backward, forward_result, new_version

BAD = Failure(kind=Kind.INVALID, code="non_finite_loss", message="the loss is not finite", details={"datum": 3})


async def test_a_claim_hands_out_the_payload_and_starts_session_and_operation(bench: Bench) -> None:
    session = await bench.open()
    operation = await bench.submit(session, forward_backward())

    work = await bench.claimed()

    assert work.lease == Lease(session_id=session.id, owner="trainer-a", epoch=1)
    assert work.payload == forward_backward()
    assert (work.operation.id, work.operation.status, work.losses) == (operation.id, Status.RUNNING, 0)
    assert (work.session.status, work.session.activity) == (SessionStatus.RUNNING, Activity.ACTIVE)
    assert work.operation.started_at == bench.clock.now()


async def test_a_trainer_gets_work_of_its_base_model_only(bench: Bench) -> None:
    await bench.submit(await bench.open())

    assert await bench.claim(base_model="other") is None
    assert await bench.claim() is not None


async def test_strict_order_waits_for_a_missing_seq(bench: Bench) -> None:
    session = await bench.open()
    await bench.submit(session, seq=2)
    third = await bench.submit(session, seq=3)
    assert await bench.claim() is None
    assert (third.queue_position, third.waits_for_seq) == (1, 1)

    await bench.submit(session, seq=1)

    assert [(await bench.run_one()).seq for _ in range(3)] == [1, 2, 3]
    assert await bench.claim() is None


async def test_ascending_order_is_not_held_up_by_a_hole(bench: Bench) -> None:
    session = await bench.open(order=OrderRule.ASCENDING)
    for seq in (9, 4):
        await bench.submit(session, seq=seq)

    assert [(await bench.run_one()).seq for _ in range(2)] == [4, 9]


async def test_only_one_operation_of_a_session_runs_at_a_time(bench: Bench) -> None:
    session = await bench.open()
    for _ in range(2):
        await bench.submit(session)
    await bench.claimed("trainer-a")

    assert await bench.claim("trainer-b") is None


async def test_racing_trainers_each_get_another_session(bench: Bench) -> None:
    opened = {(await bench.open()).id for _ in range(8)}
    for id in opened:
        async with bench.database.read() as unit:
            session = await unit.sessions.get(bench.project_id, id)
        await bench.submit(session)

    works = await asyncio.gather(*(bench.claim(f"trainer-{index}") for index in range(12)))

    assert sorted(work.session.id for work in works if work is not None) == sorted(opened)


async def test_the_session_served_least_recently_comes_first(bench: Bench) -> None:
    sessions = [await bench.open() for _ in range(3)]
    for session in sessions:
        for _ in range(3):
            await bench.submit(session)

    served: list[str] = []
    for _ in range(9):
        bench.clock.advance(1)
        work = await bench.claimed()
        await bench.finish(work)
        served.append(work.session.id)

    order = [session.id for session in sessions]
    assert served == order * 3


async def test_a_finished_operation_carries_its_outcome_and_moves_the_session(bench: Bench) -> None:
    session = await bench.open()
    await bench.submit(session, forward_backward())
    work = await bench.claimed()
    bench.clock.advance(2)
    await bench.finish(work, forward_result(2.25), bench.fact(work.operation.id, 4))

    done = await bench.operation(work.operation.id)
    now = await bench.session(session)
    async with bench.database.read() as unit:
        facts = await unit.usage.of_source(work.operation.id)
    assert (done.status, done.outcome, done.finished_at) == (
        Status.COMPLETED,
        forward_result(2.25),
        bench.clock.now(),
    )
    assert (now.applied_seq, now.activity) == (1, Activity.IDLE)
    assert [fact.quantity for fact in facts] == [4]


async def test_optimizer_steps_are_counted_as_the_trainer_reports_them(bench: Bench) -> None:
    session = await bench.open()
    for _ in range(2):
        await bench.submit(session)
    await bench.run_one(outcome=OptimStepResult(optimizer_step=1, metrics={}))
    await bench.run_one(outcome=OptimStepResult(optimizer_step=2, metrics={"grad_norm": 0.5}))

    assert (await bench.session(session)).optimizer_step == 2


async def test_a_failed_forward_backward_breaks_the_window_until_the_next_step(bench: Bench) -> None:
    session = await bench.open()
    for payload in (forward_backward(), forward_backward(), forward_backward(), OptimStep(), forward_backward()):
        await bench.submit(session, payload)

    broken: list[int | None] = []
    for outcome in (forward_result(), BAD, BAD, BAD, forward_result()):
        await bench.run_one(outcome=outcome)
        broken.append((await bench.session(session)).window_broken_by)

    assert broken == [None, 2, 2, None, None]


async def test_a_replay_leaves_out_gradients_that_a_failed_step_threw_away(bench: Bench) -> None:
    session = await bench.open()
    step = OptimStepResult(optimizer_step=1, metrics={})
    plan = [
        (forward_backward(), forward_result()),  # 1 used by 2
        (OptimStep(), step),
        (forward_backward(), forward_result()),  # 3 thrown away by 5
        (forward_backward(), BAD),
        (OptimStep(), BAD),
        (forward_backward(), forward_result()),  # 6
        (OptimStep(), step),
    ]
    for payload, outcome in plan:
        await bench.submit(session, payload)
        await bench.run_one(outcome=outcome)

    async with bench.database.read() as unit:
        replayed = await unit.work.completed_after(session.id, 0)
        later = await unit.work.completed_after(session.id, 2)
    assert [operation.seq for operation in replayed] == [1, 2, 6, 7]
    assert [operation.seq for operation in later] == [6, 7]
    assert all(operation.outcome is None for operation in replayed)


async def test_a_live_lease_keeps_other_trainers_out_and_the_epoch_stays(bench: Bench) -> None:
    session = await bench.open()
    for _ in range(3):
        await bench.submit(session)
    await bench.run_one("trainer-a")
    bench.clock.advance(LEASE_S - 0.001)

    assert await bench.claim("trainer-b") is None
    assert (await bench.claimed("trainer-a")).lease.epoch == 1


async def test_a_lease_that_ran_out_goes_to_another_trainer_under_a_new_epoch(bench: Bench) -> None:
    session = await bench.open()
    await bench.submit(session)
    lost = await bench.claimed("trainer-a")
    await bench.begin(lost)
    bench.clock.advance(LEASE_S)

    again = await bench.claimed("trainer-b")

    assert (again.operation.id, again.losses) == (lost.operation.id, 1)
    assert (again.lease.owner, again.lease.epoch) == ("trainer-b", 2)
    assert again.operation.started_at == lost.operation.started_at


async def test_a_lease_that_ran_out_costs_its_own_trainer_the_epoch_too(bench: Bench) -> None:
    await bench.submit(await bench.open())
    await bench.claimed("trainer-a")
    bench.clock.advance(LEASE_S)

    assert (await bench.claimed("trainer-a")).lease.epoch == 2


async def test_a_renewed_lease_lasts_and_a_lapsed_one_is_not_renewed(bench: Bench) -> None:
    session = await bench.open()
    await bench.submit(session)
    await bench.claimed("trainer-a")
    bench.clock.advance(LEASE_S - 1)

    async with bench.database.write() as unit:
        assert await unit.work.renew(owner="trainer-b", lease_s=LEASE_S, at=bench.clock.now()) == {}
        assert await unit.work.renew(owner="trainer-a", lease_s=LEASE_S, at=bench.clock.now()) == {session.id: 1}
    bench.clock.advance(LEASE_S - 1)
    assert await bench.claim("trainer-b") is None
    bench.clock.advance(1)
    async with bench.database.write() as unit:
        assert await unit.work.renew(owner="trainer-a", lease_s=LEASE_S, at=bench.clock.now()) == {}


async def test_a_released_session_is_free_at_once(bench: Bench) -> None:
    session = await bench.open()
    for _ in range(2):
        await bench.submit(session)
    work = await bench.claimed("trainer-a")
    await bench.finish(work)
    async with bench.database.write() as unit:
        await unit.work.release(work.lease)

    assert (await bench.claimed("trainer-b")).lease.epoch == 2


async def write_everything(bench: Bench, work: Work) -> list[type[BaseException] | None]:
    """Try every write of a trainer under ``work``'s lease; return what each raised."""
    raised: list[type[BaseException] | None] = []
    for write in ("finish", "stage", "snapshot", "recovering", "begin", "fail"):
        try:
            async with bench.database.write() as unit:
                at = bench.clock.now()
                match write:
                    case "finish":
                        await unit.work.finish(
                            work.lease, work.operation, forward_result(), facts=[bench.fact(work.operation.id)], at=at
                        )
                    case "stage":
                        await unit.work.stage(work.lease, work.operation, new_version(1), complete=True, at=at)
                    case "snapshot":
                        await unit.work.snapshot_taken(work.lease, Snapshot(seq=1, location="s"), made_with={})
                    case "recovering":
                        await unit.work.recovering(work.lease, seq=1, losses=0)
                    case "begin":
                        await unit.work.begin(work, rules=RULES, made_with={}, note=None)
                    case _:
                        await unit.work.fail_session(work.lease, "gone", at=at)
        except StaleLease as stale:
            raised.append(type(stale))
        else:
            raised.append(None)
    return raised


async def test_a_stale_lease_writes_nothing(bench: Bench) -> None:
    session = await bench.open()
    await bench.submit(session)
    stale = await bench.claimed("trainer-a")
    bench.clock.advance(LEASE_S)
    current = await bench.claimed("trainer-b")
    before = await bench.session(session)

    assert await write_everything(bench, stale) == [StaleLease] * 6

    async with bench.database.read() as unit:
        facts = await unit.usage.of_source(stale.operation.id)
        versions = await unit.versions.page(bench.project_id, VersionFilter(), limit=10, after=None)
    assert (await bench.session(session), facts, versions) == (before, [], [])
    assert (await bench.operation(stale.operation.id)).status is Status.RUNNING
    await bench.finish(current)
    assert (await bench.operation(stale.operation.id)).status is Status.COMPLETED


async def test_a_released_lease_is_stale(bench: Bench) -> None:
    await bench.submit(await bench.open())
    work = await bench.claimed()
    async with bench.database.write() as unit:
        await unit.work.release(work.lease)

    with pytest.raises(StaleLease):
        await bench.finish(work)


async def test_reporting_an_outcome_again_changes_nothing(bench: Bench) -> None:
    session = await bench.open()
    await bench.submit(session)
    work = await bench.claimed()
    await bench.finish(work, OptimStepResult(optimizer_step=1, metrics={}), bench.fact(work.operation.id))
    done = await bench.operation(work.operation.id)
    bench.clock.advance(1)

    await bench.finish(work, OptimStepResult(optimizer_step=2, metrics={}), bench.fact(work.operation.id, 99))

    async with bench.database.read() as unit:
        facts = await unit.usage.of_source(work.operation.id)
    assert await bench.operation(work.operation.id) == done
    assert [fact.quantity for fact in facts] == [5]
    assert (await bench.session(session)).optimizer_step == 1


async def test_an_operation_waiting_for_the_gate_is_never_handed_out_again(bench: Bench) -> None:
    session = await bench.open()
    await bench.submit(session, SaveWeights(group="policy"))
    later = await bench.submit(session)
    work = await bench.claimed("trainer-a")
    await bench.stage(work)
    bench.clock.advance(LEASE_S)

    again = await bench.claimed("trainer-b")

    assert again.operation.id == later.id
    await bench.finish(again)
    assert await bench.claim("trainer-b") is None
    assert (await bench.operation(work.operation.id)).status is Status.RUNNING


async def test_a_recovery_shows_how_far_it_is_until_the_operation_begins(bench: Bench) -> None:
    session = await bench.open()
    await bench.submit(session)
    work = await bench.claimed()

    async with bench.database.write() as unit:
        await unit.work.recovering(work.lease, seq=7, losses=2)
    recovering = await bench.session(session)
    await bench.begin(work)
    active = await bench.session(session)

    assert (recovering.activity, recovering.recovery) == (Activity.RECOVERING, Recovery(seq=7, losses=2))
    assert (active.activity, active.recovery) == (Activity.ACTIVE, None)


async def test_a_recovery_whose_trainer_was_lost_is_known_to_the_next_one(bench: Bench) -> None:
    await bench.submit(await bench.open())
    work = await bench.claimed("trainer-a")
    async with bench.database.write() as unit:
        await unit.work.recovering(work.lease, seq=7, losses=2)
    bench.clock.advance(LEASE_S)

    assert (await bench.claimed("trainer-b")).session.recovery == Recovery(seq=7, losses=2)


async def test_only_trainers_that_were_lost_while_they_ran_an_operation_count_against_it(bench: Bench) -> None:
    session = await bench.open()
    await bench.submit(session)
    losses: list[int] = []
    for begun in (False, True, False, True, False):
        work = await bench.claimed()
        losses.append(work.losses)
        if begun:
            await bench.begin(work)
            await bench.begin(work)  # the answer to the first was lost
        bench.clock.advance(LEASE_S)

    assert losses == [0, 0, 1, 1, 2]


async def test_an_operation_of_a_resident_session_begins_with_its_claim(bench: Bench) -> None:
    session = await bench.open()
    for _ in range(2):
        await bench.submit(session)
    await bench.run_one()
    async with bench.database.write() as unit:
        await unit.work.claim(
            owner="trainer-a", base_model=BASE, lease_s=LEASE_S, at=bench.clock.now(), resident=[session.id]
        )
    again = await bench.claimed("trainer-a")  # the answer to that claim was lost: no trainer was
    bench.clock.advance(LEASE_S)

    assert again.losses == 0
    assert (await bench.claimed("trainer-b")).losses == 1


async def test_the_rules_of_the_first_run_stay(bench: Bench) -> None:
    session = await bench.open()
    for _ in range(2):
        await bench.submit(session)
    work = await bench.claimed()
    await bench.begin(work)
    await bench.finish(work)
    work = await bench.claimed()
    async with bench.database.write() as unit:
        other = ComputeRules(threads=8, micro_batch_tokens=1)
        await unit.work.begin(work, rules=other, made_with={"torch": "9"}, note="replayed with torch 9")
    after = await bench.session(session)

    assert (after.rules, after.made_with, after.replay_note) == (RULES, {"torch": "9"}, "replayed with torch 9")


async def test_the_leases_of_a_dead_trainer_can_be_given_back_at_once(bench: Bench) -> None:
    mine, others = await bench.open(), await bench.open()
    for session in (mine, others):
        await bench.submit(session)
    await bench.claimed("dead")
    await bench.claimed("alive")
    async with bench.database.write() as unit:
        owners = await unit.work.owners(BASE)
        released = await unit.work.release_all("dead")

    assert (sorted(owners), released) == (["alive", "dead"], 1)
    work = await bench.claimed("trainer-b")
    assert (work.session.id, work.lease.epoch) == (mine.id, 2)


async def test_a_lease_from_before_the_clock_was_set_back_is_over_within_a_minute(bench: Bench) -> None:
    session = await bench.open()
    await bench.submit(session)
    await bench.claimed("trainer-a")
    bench.clock.advance(-3600)

    assert (await bench.claimed("trainer-b")).lease.epoch == 2


async def test_a_snapshot_is_where_the_next_trainer_starts(bench: Bench) -> None:
    session = await bench.open()
    for payload in (forward_backward(), OptimStep(), OptimStep()):
        await bench.submit(session, payload)
    await bench.run_one(outcome=forward_result())
    work = await bench.claimed()
    await bench.finish(work)
    async with bench.database.write() as unit:
        await unit.work.snapshot_taken(work.lease, Snapshot(seq=2, location="snap-1"), made_with={})
    bench.clock.advance(LEASE_S)

    assert (await bench.claimed("trainer-b")).session.snapshot == Snapshot(seq=2, location="snap-1")


async def test_a_loaded_state_sets_the_step(bench: Bench) -> None:
    session = await bench.open()
    version = await bench.save(session, complete=True)
    await bench.submit(session)
    work = await bench.claimed()

    await bench.finish(
        work, LoadStateResult(version_id=version.version_id, optimizer_step=17, discarded_gradient=False)
    )

    assert (await bench.session(session)).optimizer_step == 17


async def test_a_failed_session_ends_with_its_running_and_queued_operations(bench: Bench) -> None:
    session = await bench.open()
    operations = [await bench.submit(session) for _ in range(3)]
    work = await bench.claimed()

    async with bench.database.write() as unit:
        await unit.work.fail_session(work.lease, "its snapshot is corrupt", at=bench.clock.now())

    now = await bench.session(session)
    assert (now.status, now.failure, now.activity) == (
        SessionStatus.FAILED,
        "its snapshot is corrupt",
        Activity.IDLE,
    )
    ended = [await bench.operation(operation.id) for operation in operations]
    assert [operation.status for operation in ended] == [Status.FAILED, Status.SKIPPED, Status.SKIPPED]
    assert isinstance(ended[0].outcome, Failure)
    assert ended[0].outcome.code == "session_failed"


async def test_a_read_sees_one_state_whatever_is_committed_meanwhile(database: SqlDatabase, bench: Bench) -> None:
    session = await bench.open()
    async with database.read() as unit:
        before = await unit.operations.page(bench.project_id, session.id, limit=10, after_seq=0)
        await bench.submit(session)
        after = await unit.operations.page(bench.project_id, session.id, limit=10, after_seq=0)

    assert (len(before), len(after)) == (0, 0)


async def test_writing_through_a_read_is_an_error(database: SqlDatabase, bench: Bench) -> None:
    async with database.read() as unit:
        with pytest.raises(RuntimeError, match="only reads"):
            await unit.keys.ensure_project("other")
