"""The loop on the real store: order, reports, usage, failures, fencing, parking."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.core.canary import Canary
from gateway.core.catalog import BaseModel
from gateway.core.errors import Invalid, Kind
from gateway.core.ids import SessionId
from gateway.core.operations import Progress, Status
from gateway.core.payloads import ForwardBackward, LoadState, OptimStep, Payload, Publish, SaveState, SaveWeights
from gateway.core.results import Failure, ForwardResult, LoadStateResult, OptimStepResult, SaveResult
from gateway.core.sessions import SessionStatus
from gateway.core.versions import Labels, VersionKind
from tests.trainer.builders import batch, forward, forward_backward
from tests.trainer.world import LEASE_S, World, drain
from trainer import loop as loop_module
from trainer.kernels import Kernels
from trainer.progress import Note, unnoted
from trainer.scripted import ScriptedBackend

STEP = OptimStep(learning_rate=1e-3)


def save_lazily() -> SaveWeights:
    return SaveWeights(group="policy", publish=Publish.LAZY)


def fb(seed: int) -> ForwardBackward:
    return forward_backward(batch(seed, lengths=(5, 3)))


async def test_operations_run_in_order_and_complete_with_their_results(world: World) -> None:
    session = await world.open()
    operations = await world.submit(session, forward(batch(1)), fb(1), STEP, fb(1), STEP)

    assert await drain(world.trainer(ScriptedBackend(world.base))) == 5

    outcomes = [(await world.read(operation)).outcome for operation in operations]
    assert [type(outcome) for outcome in outcomes] == [
        ForwardResult,
        ForwardResult,
        OptimStepResult,
        ForwardResult,
        OptimStepResult,
    ]
    first, second = outcomes[1], outcomes[3]
    assert isinstance(first, ForwardResult)
    assert isinstance(second, ForwardResult)
    assert abs(second.metrics["loss:sum"]) < abs(first.metrics["loss:sum"])
    assert (await world.session(session)).applied_seq == 5
    assert (await world.session(session)).optimizer_step == 2


async def test_only_successful_forward_passes_are_counted_by_the_token(world: World) -> None:
    session = await world.open()
    await world.submit(session, forward(batch(1)), fb(1), STEP, STEP)

    await drain(world.trainer(ScriptedBackend(world.base)))

    assert await world.trained_tokens() == sum((24, 9, 17, 24)) + 8


async def test_an_empty_window_is_a_user_error_and_later_operations_go_on(world: World) -> None:
    session = await world.open()
    empty, after, step = await world.submit(session, STEP, fb(1), STEP)

    await drain(world.trainer(ScriptedBackend(world.base)))

    outcome = (await world.read(empty)).outcome
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.code) == (Kind.INVALID, "empty_window")
    assert (await world.read(after)).status is Status.COMPLETED
    assert (await world.read(step)).status is Status.COMPLETED


async def test_a_lost_trainers_work_is_replayed_without_billing_it_again(world: World) -> None:
    session = await world.open()
    await world.submit(session, fb(1), STEP, fb(2))
    lost = world.trainer(ScriptedBackend(world.base))
    await drain(lost)
    billed = await world.trained_tokens()

    await world.submit(session, STEP, save_lazily())
    world.clock.advance(LEASE_S + 1)
    await drain(world.trainer(ScriptedBackend(world.base)))

    alone = await world.open()
    await world.submit(alone, fb(1), STEP, fb(2), STEP, save_lazily())
    await drain(world.trainer(ScriptedBackend(world.base)))
    recovered, uninterrupted = await world.versions()
    assert world.fingerprint(recovered) == world.fingerprint(uninterrupted)
    assert billed == 16
    assert await world.trained_tokens() == 2 * billed


class Held(ScriptedBackend):
    """Stands still inside a kernel until released."""

    def __init__(self, base: BaseModel) -> None:
        super().__init__(base)
        self.entered, self.released = threading.Event(), threading.Event()

    def forward_backward(self, session_id: SessionId, payload: ForwardBackward, note: Note = unnoted) -> ForwardResult:
        note(1, 2)
        self._hold()
        return super().forward_backward(session_id, payload, note)

    def write_adapter(self, session_id: SessionId, directory: Path) -> Canary:
        self._hold()
        return super().write_adapter(session_id, directory)

    def _hold(self) -> None:
        self.entered.set()
        assert self.released.wait(timeout=30)


@pytest.mark.parametrize("payload", [fb(1), SaveWeights(group="policy", publish=Publish.LAZY)], ids=["fb", "save"])
async def test_a_trainer_that_lost_its_lease_writes_nothing(world: World, payload: Payload) -> None:
    session = await world.open()
    (operation,) = await world.submit(session, payload)
    held = Held(world.base)
    with Kernels() as other_thread:
        slow = asyncio.create_task(world.trainer(held, kernels=other_thread).step())
        await asyncio.to_thread(held.entered.wait, 30)
        world.clock.advance(LEASE_S + 1)
        await drain(world.trainer(ScriptedBackend(world.base)))
        taken_over = await world.read(operation)
        held.released.set()
        assert await slow

    assert taken_over.status is Status.COMPLETED
    assert await world.read(operation) == taken_over
    assert await world.trained_tokens() == (8 if isinstance(payload, ForwardBackward) else 0)
    assert world.committed_locations() == [version.location for version in await world.versions()]
    with pytest.raises(KeyError):
        held.optimizer_step(session.id)  # no longer resident


async def test_the_progress_of_an_operation_is_visible_while_it_runs_and_not_after(world: World) -> None:
    session = await world.open()
    (operation,) = await world.submit(session, fb(1))
    held = Held(world.base)
    with Kernels() as other_thread:
        slow = asyncio.create_task(world.trainer(held, kernels=other_thread).step())
        async with asyncio.timeout(30):
            while (running := await world.read(operation)).progress is None:
                await asyncio.sleep(0.05)
        held.released.set()
        assert await slow

    assert running.progress == Progress(done=1, total=2)
    assert (await world.read(operation)).progress is None


async def test_a_trainer_without_the_lease_shows_no_progress(world: World) -> None:
    session = await world.open()
    (operation,) = await world.submit(session, fb(1))
    await world.claim_and_vanish()
    async with world.database.write() as unit:
        work = await unit.work.claim(owner="new", base_model=world.base.name, lease_s=LEASE_S, at=world.clock.now())
        assert work is not None
        stale = replace(work.lease, epoch=work.lease.epoch - 1)
        await unit.work.set_progress(stale, operation.id, Progress(done=1, total=2))
    before = await world.read(operation)
    async with world.database.write() as unit:
        await unit.work.set_progress(work.lease, operation.id, Progress(done=2, total=4))

    assert before.progress is None
    assert (await world.read(operation)).progress == Progress(done=2, total=4)


async def test_an_operation_that_loses_two_trainers_is_given_up(world: World) -> None:
    session = await world.open()
    killer, after, step = await world.submit(session, fb(1), fb(2), STEP)
    for _ in range(2):  # two trainers are lost after their claim
        await world.claim_and_vanish()

    await drain(world.trainer(ScriptedBackend(world.base)))

    outcome = (await world.read(killer)).outcome
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.code) == (Kind.INTERNAL, "poison_operation")
    assert (await world.read(after)).status is Status.COMPLETED
    incomplete = (await world.read(step)).outcome
    assert isinstance(incomplete, Failure)
    assert (incomplete.code, incomplete.details["seq"]) == ("incomplete_window", 1)


class Failing(ScriptedBackend):
    """Refuses batches of one datum, and has a defect with three."""

    def forward_backward(self, session_id: SessionId, payload: ForwardBackward, note: Note = unnoted) -> ForwardResult:
        if len(payload.data) == 1:
            raise Invalid("not finite", code="non_finite_loss", field="data[0]", details={"datum": 0})
        if len(payload.data) == 3:
            raise RuntimeError("secret inner workings")
        return super().forward_backward(session_id, payload, note)


async def test_a_failed_forward_backward_breaks_its_window_and_the_next_one_is_whole(world: World) -> None:
    session = await world.open()
    bad = forward_backward(batch(9, lengths=(4,)))
    _, failed, broken, _, step, save = await world.submit(session, fb(1), bad, STEP, fb(2), STEP, save_lazily())

    await drain(world.trainer(Failing(world.base)))

    assert (await world.read(failed)).status is Status.FAILED
    outcome = (await world.read(broken)).outcome
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.code, outcome.details["seq"]) == (Kind.INVALID, "incomplete_window", 2)
    assert (await world.read(step)).status is Status.COMPLETED
    assert (await world.read(save)).status is Status.COMPLETED
    assert await world.last_fingerprint() == await fingerprint_of(world, fb(2), STEP)


async def test_a_discarded_window_stays_discarded_in_a_replay(world: World) -> None:
    session = await world.open()
    await world.submit(session, fb(1), forward_backward(batch(9, lengths=(4,))), STEP, fb(2))
    await drain(world.trainer(Failing(world.base)))

    world.clock.advance(LEASE_S + 1)
    await world.submit(session, STEP, save_lazily())
    await drain(world.trainer(Failing(world.base)))

    assert await world.last_fingerprint() == await fingerprint_of(world, fb(2), STEP)


async def test_a_broken_window_is_remembered_by_the_next_trainer(world: World) -> None:
    session = await world.open()
    await world.submit(session, fb(1), forward_backward(batch(9, lengths=(4,))))
    await drain(world.trainer(Failing(world.base)))

    world.clock.advance(LEASE_S + 1)
    (step,) = await world.submit(session, STEP)
    await drain(world.trainer(Failing(world.base)))

    outcome = (await world.read(step)).outcome
    assert isinstance(outcome, Failure)
    assert (outcome.code, outcome.details["seq"]) == ("incomplete_window", 2)


async def test_a_discarded_window_stays_discarded_after_a_snapshot_that_held_it(world: World) -> None:
    session = await world.open()
    await world.submit(session, fb(1))
    parking = world.trainer(Failing(world.base))
    await drain(parking)
    await parking.park_all()
    await world.submit(session, forward_backward(batch(9, lengths=(4,))), STEP, fb(2))
    await drain(world.trainer(Failing(world.base)))

    world.clock.advance(LEASE_S + 1)
    await world.submit(session, STEP, save_lazily())
    await drain(world.trainer(Failing(world.base)))

    assert await world.last_fingerprint() == await fingerprint_of(world, fb(2), STEP)


async def test_a_defect_fails_one_operation_without_telling_and_the_session_goes_on(world: World) -> None:
    session = await world.open()
    _, crashed, step, _, again, _ = await world.submit(
        session, fb(1), forward_backward(batch(9, lengths=(4, 4, 4))), STEP, fb(2), STEP, save_lazily()
    )

    await drain(world.trainer(Failing(world.base)))

    outcome = (await world.read(crashed)).outcome
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.code) == (Kind.INTERNAL, "trainer_error")
    assert "secret" not in outcome.message
    assert (await world.read(step)).status is Status.FAILED
    assert (await world.read(again)).status is Status.COMPLETED
    assert await world.last_fingerprint() == await fingerprint_of(world, fb(2), STEP)


async def test_more_sessions_than_fit_are_parked_and_come_back_equal(world: World) -> None:
    sessions = [await world.open() for _ in range(3)]
    trainer = world.trainer(ScriptedBackend(world.base), max_resident=1)
    for seed in (1, 2):
        for session in sessions:
            await world.submit(session, fb(seed))
        await drain(trainer)
    for session in sessions:
        await world.submit(session, STEP, save_lazily())
    await drain(trainer)

    expected = await fingerprint_of(world, fb(1), fb(2), STEP)
    versions = await world.versions()
    assert [world.fingerprint(version) for version in versions[:3]] == [expected] * 3
    assert all(location.startswith("snapshot-") for location in world.committed_locations()[: -len(versions)])


async def test_a_long_replay_is_cut_short_by_a_snapshot_and_only_the_last_one_is_kept(world: World) -> None:
    session = await world.open()
    await world.submit(session, fb(1), STEP, fb(2))

    await drain(world.trainer(ScriptedBackend(world.base), snapshot_after_s=0.0))

    snapshot = (await world.session(session)).snapshot
    assert snapshot is not None
    assert snapshot.seq == 3
    assert world.committed_locations() == [snapshot.location]


async def test_a_damaged_snapshot_fails_the_session_and_never_starts_afresh(world: World) -> None:
    session = await world.open()
    await world.submit(session, fb(1), STEP)
    trainer = world.trainer(ScriptedBackend(world.base))
    await drain(trainer)
    await trainer.park_all()
    snapshot = (await world.session(session)).snapshot
    assert snapshot is not None
    next(world.artifacts.path(snapshot.location).glob("state*")).write_text("{}")

    operation, queued = await world.submit(session, fb(2), STEP)
    await drain(world.trainer(ScriptedBackend(world.base)))

    outcome = (await world.read(operation)).outcome
    assert isinstance(outcome, Failure)
    assert outcome.kind is Kind.INTERNAL
    assert (await world.read(queued)).status is Status.SKIPPED
    failed = await world.session(session)
    assert failed.status is SessionStatus.FAILED
    assert failed.failure is not None
    assert "cannot be rebuilt" in failed.failure


async def test_saves_become_versions_with_what_they_contain(world: World) -> None:
    session = await world.open()
    eager, lazy, merged, state = await world.submit(
        session,
        SaveWeights(group="policy", labels=Labels(description="first")),
        save_lazily(),
        SaveWeights(group="full", merge=True),
        SaveState(group="policy"),
    )

    await drain(world.trainer(ScriptedBackend(world.base)))

    versions = await world.versions()
    assert [version.kind for version in versions] == [
        VersionKind.ADAPTER,
        VersionKind.ADAPTER,
        VersionKind.MERGED,
        VersionKind.STATE,
    ]
    assert [version.seq for version in versions] == [1, 2, 3, 4]
    assert (await world.read(eager)).status is Status.RUNNING  # the publish gate ends it
    for operation, version in zip((lazy, merged, state), versions[1:], strict=True):
        outcome = (await world.read(operation)).outcome
        assert isinstance(outcome, SaveResult)
        assert (outcome.version_id, outcome.group, outcome.number) == (version.id, version.group, version.number)
        assert (outcome.seq, outcome.optimizer_step) == (version.seq, version.optimizer_step)
    for version in versions:
        manifest = world.artifacts.verify(version.location, version.manifest_sha256)
        assert (manifest.canary is not None) is (version.kind is VersionKind.ADAPTER)


async def test_a_loaded_state_replaces_the_window_and_says_so(world: World) -> None:
    session = await world.open()
    await world.submit(session, fb(1), STEP, SaveState(group="policy"), fb(2))
    trainer = world.trainer(ScriptedBackend(world.base))
    await drain(trainer)
    (state,) = await world.versions()
    load, after, _ = await world.submit(session, LoadState(version_id=state.id, optimizer=True), STEP, save_lazily())
    await drain(trainer)

    assert (await world.read(load)).outcome == LoadStateResult(
        version_id=state.id, optimizer_step=1, discarded_gradient=True
    )
    assert (await world.read(after)).status is Status.FAILED
    assert await world.last_fingerprint() == await fingerprint_of(world, fb(1), STEP)


async def test_sigterm_ends_the_run_with_every_session_on_disk_and_free(world: World) -> None:
    session = await world.open()
    trainer = world.trainer(ScriptedBackend(world.base))
    running = asyncio.create_task(trainer.run())
    (operation,) = await world.submit(session, fb(1))
    seen = 0
    while not (await world.read(operation)).final:
        seen = await world.database.wakeups.wait(seen, 5.0)
    trainer.stop()
    await running

    snapshot = (await world.session(session)).snapshot
    assert snapshot is not None
    assert snapshot.seq == 1
    await world.submit(session, STEP, save_lazily())
    await drain(world.trainer(ScriptedBackend(world.base)))  # the clock stands: no lease had to run out
    assert await world.last_fingerprint() == await fingerprint_of(world, fb(1), STEP)


async def test_a_trainer_without_work_looks_for_it_less_often_until_there_is_some(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Recorded:
        """The database's, and how it was waited for."""

        def __init__(self) -> None:
            self.waits: asyncio.Queue[bool] = asyncio.Queue()

        async def wait(self, seen: int, timeout_s: float, *, patient: bool = False) -> int:
            self.waits.put_nowait(patient)
            return await world.database.wakeups.wait(seen, timeout_s, patient=patient)

    async def until(*, patient: bool) -> None:
        while await recorded.waits.get() is not patient:
            pass

    monkeypatch.setattr(loop_module, "PATIENT_AFTER_S", 0.2)
    recorded, session = Recorded(), await world.open()
    trainer = world.trainer(ScriptedBackend(world.base), wakeups=recorded, heartbeat_s=0.1)
    running = asyncio.create_task(trainer.run())
    async with asyncio.timeout(30):
        assert not await recorded.waits.get()
        await until(patient=True)
        await world.submit(session, fb(1))
        await until(patient=False)
        await until(patient=True)
    trainer.stop()
    await running


async def fingerprint_of(world: World, *payloads: Payload) -> str:
    """Return what a session that did just this, undisturbed, would save."""
    session = await world.open()
    await world.submit(session, *payloads, save_lazily())
    await drain(world.trainer(ScriptedBackend(world.base)))
    return await world.last_fingerprint()
