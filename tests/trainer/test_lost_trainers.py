"""Trainers that die at the wrong moment, disks that are full, and what the session tells of it."""

import asyncio
import errno
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gateway.core.canary import Canary
from gateway.core.catalog import BaseModel
from gateway.core.errors import Kind, Unavailable
from gateway.core.ids import SessionId
from gateway.core.operations import Status
from gateway.core.payloads import LoadState, OptimStep, SaveState
from gateway.core.results import Failure, OptimStepResult
from gateway.core.sessions import Activity, ComputeRules, LoraConfig, Recovery, SessionStatus
from gateway.store import LocalArtifacts
from tests.trainer.conftest import ON_BOTH
from tests.trainer.test_loop import STEP, fb, fingerprint_of, save_lazily
from tests.trainer.world import LEASE_S, World, drain
from trainer.kernels import Kernels
from trainer.scripted import ScriptedBackend

pytestmark = ON_BOTH


async def test_trainers_that_are_lost_before_they_begin_an_operation_do_not_count_against_it(world: World) -> None:
    session = await world.open()
    (operation,) = await world.submit(session, fb(1))
    for _ in range(4):
        await world.claim_and_vanish(begin=False)

    await drain(world.trainer(ScriptedBackend(world.base)))

    assert (await world.read(operation)).status is Status.COMPLETED


@pytest.mark.parametrize(("losses", "ends"), [(4, SessionStatus.RUNNING), (6, SessionStatus.FAILED)])
async def test_a_rebuild_that_kills_one_trainer_after_the_other_ends_the_session_not_the_machine(
    world: World, losses: int, ends: SessionStatus
) -> None:
    session = await world.open()
    await world.submit(session, fb(1), STEP)
    await drain(world.trainer(ScriptedBackend(world.base)))
    world.clock.advance(LEASE_S + 1)
    await world.submit(session, fb(2))
    for _ in range(losses):
        await world.rebuild_and_vanish()

    await drain(world.trainer(ScriptedBackend(world.base)))

    assert (await world.session(session)).status is ends


class Slow(ScriptedBackend):
    """Every replayed batch takes long enough to be shown: the clock of the recovery stands still otherwise."""

    def __init__(self, base: BaseModel) -> None:
        super().__init__(base)
        self.entered, self.released = threading.Event(), threading.Event()

    def optim_step(self, session_id: SessionId, payload: OptimStep) -> OptimStepResult:
        self.entered.set()
        assert self.released.wait(timeout=30)
        return super().optim_step(session_id, payload)


async def test_a_recovery_is_visible_in_the_session_until_it_is_over(world: World) -> None:
    session = await world.open()
    await world.submit(session, fb(1), STEP)
    trainer = world.trainer(ScriptedBackend(world.base))
    await drain(trainer)
    world.clock.advance(LEASE_S + 1)
    await world.submit(session, fb(2))
    slow = Slow(world.base)
    with Kernels() as other_thread:
        recovering = asyncio.create_task(world.trainer(slow, kernels=other_thread).step())
        await asyncio.to_thread(slow.entered.wait, 30)
        during = await world.session(session)
        slow.released.set()
        assert await recovering

    assert (during.activity, during.recovery) == (Activity.RECOVERING, Recovery(seq=0, losses=0))
    after = await world.session(session)
    assert (after.activity, after.recovery) == (Activity.IDLE, None)


class Recording(ScriptedBackend):
    """Remembers which sessions were brought into memory, in order."""

    def __init__(self, base: BaseModel) -> None:
        super().__init__(base)
        self.brought: list[SessionId] = []

    def open(self, session_id: SessionId, lora: LoraConfig, rules: ComputeRules | None = None) -> None:
        self.brought.append(session_id)
        super().open(session_id, lora, rules)

    def restore(
        self, session_id: SessionId, lora: LoraConfig, directory: Path, rules: ComputeRules | None = None
    ) -> None:
        self.brought.append(session_id)
        super().restore(session_id, lora, directory, rules)


async def test_of_twenty_sessions_only_those_that_have_work_are_rebuilt(world: World) -> None:
    sessions = [await world.open() for _ in range(20)]
    for session in sessions:
        await world.submit(session, fb(1))
    lost = Recording(world.base)
    await drain(world.trainer(lost))  # 8 stay in memory, 12 are parked
    world.clock.advance(LEASE_S + 1)
    active = [sessions[place] for place in (1, 11, 18)]
    for session in active:
        await world.submit(session, STEP)
    backend = Recording(world.base)

    assert await drain(world.trainer(backend)) == 3

    assert sorted(lost.brought) == sorted(session.id for session in sessions)
    assert sorted(backend.brought) == sorted(session.id for session in active)
    assert [(await world.session(session)).optimizer_step for session in active] == [1, 1, 1]


class Newer(ScriptedBackend):
    """The scripted backend as if of another release."""

    @property
    def made_with(self) -> Mapping[str, str]:
        return {"backend": "scripted", "torch": "9"}


async def test_a_replay_by_another_version_is_told_in_the_session_and_in_the_log(world: World) -> None:
    session = await world.open()
    await world.submit(session, fb(1), STEP)
    await drain(world.trainer(ScriptedBackend(world.base)))
    world.clock.advance(LEASE_S + 1)
    await world.submit(session, fb(2))

    with capture_logs() as logged:
        await drain(world.trainer(Newer(world.base)))

    note = (await world.session(session)).replay_note
    assert note == "operations 1 to 2 were replayed with torch 9 instead of none: bits may differ from the first run"
    assert [each["note"] for each in logged if each["event"] == "replayed_by_other_versions"] == [note]


async def test_a_session_that_was_parked_before_an_upgrade_is_not_replayed_and_nothing_is_told(world: World) -> None:
    session = await world.open()
    await world.submit(session, fb(1), STEP)
    before = world.trainer(ScriptedBackend(world.base))
    await drain(before)
    await before.park_all()
    await world.submit(session, fb(2), STEP)
    await drain(world.trainer(Newer(world.base)))
    world.clock.advance(LEASE_S + 1)
    await world.submit(session, fb(3))

    await drain(world.trainer(Newer(world.base)))  # replays what ran under the newer version

    assert (await world.session(session)).replay_note is None


class FullDisk(ScriptedBackend):
    """Has no room for files while ``full``."""

    full = True

    def write_snapshot(self, session_id: SessionId, directory: Path) -> None:
        self._write()
        super().write_snapshot(session_id, directory)

    def write_adapter(self, session_id: SessionId, directory: Path) -> Canary:
        (directory / "half").write_text("half")
        self._write()
        (directory / "half").unlink()
        return super().write_adapter(session_id, directory)

    def _write(self) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_full_disk_fails_saves_and_nothing_else_and_is_over_without_a_restart(world: World) -> None:
    session = await world.open()
    backend = FullDisk(world.base)
    trainer = world.trainer(backend, snapshot_after_s=0.0)
    first, failed, step = await world.submit(session, fb(1), save_lazily(), STEP)
    await drain(trainer)
    on_disk = world.committed_locations()
    backend.full = False
    (saved,) = await world.submit(session, save_lazily())
    await drain(trainer)

    outcome = (await world.read(failed)).outcome
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.code) == (Kind.UNAVAILABLE, "disk_full")
    for operation in (first, step, saved):
        assert (await world.read(operation)).status is Status.COMPLETED
    assert on_disk == []
    assert await world.last_fingerprint() == await fingerprint_of(world, fb(1), STEP)


async def test_a_session_that_cannot_be_written_at_the_end_is_given_back_all_the_same(world: World) -> None:
    sessions = [await world.open() for _ in range(2)]
    for session in sessions:
        await world.submit(session, fb(1))
    trainer = world.trainer(FullDisk(world.base))
    await drain(trainer)
    await trainer.park_all()
    for session in sessions:
        await world.submit(session, STEP, save_lazily())

    await drain(world.trainer(ScriptedBackend(world.base)))  # the clock stands: no lease had to run out

    expected = await fingerprint_of(world, fb(1), STEP)
    versions = await world.versions()
    assert [world.fingerprint(version) for version in versions[:2]] == [expected] * 2


async def test_a_recovery_does_not_need_a_version_that_was_loaded_and_then_deleted(world: World) -> None:
    session = await world.open()
    await world.submit(session, fb(1), STEP, SaveState(group="policy"), fb(2), STEP)
    trainer = world.trainer(ScriptedBackend(world.base))
    await drain(trainer)
    (state,) = await world.versions()
    await world.submit(session, LoadState(version_id=state.id, optimizer=True), fb(3), STEP)
    await drain(trainer)
    world.artifacts.remove(state.location)
    world.clock.advance(LEASE_S + 1)
    await world.submit(session, save_lazily())

    await drain(world.trainer(ScriptedBackend(world.base)))

    assert await world.last_fingerprint() == await fingerprint_of(world, fb(1), STEP, fb(3), STEP)


class Sticky(LocalArtifacts):
    """Cannot delete, as a store that is away or a disk that is read-only."""

    def __init__(self, root: Path, error: Exception) -> None:
        super().__init__(root)
        self._error = error

    def remove(self, location: str) -> None:
        raise self._error


@pytest.mark.parametrize("error", [OSError(errno.EROFS, "Read-only file system"), Unavailable("away")], ids=repr)
async def test_files_that_cannot_be_deleted_stop_neither_operations_nor_a_drain(world: World, error: Exception) -> None:
    sticky = Sticky(world.artifacts.path("x").parent, error)
    sessions = [await world.open() for _ in range(2)]
    trainer = world.trainer(ScriptedBackend(world.base), artifacts=sticky, snapshot_after_s=0.0)
    for session in sessions:
        await world.submit(session, fb(1), STEP)
    await drain(trainer)
    await trainer.park_all()
    await world.submit(sessions[0], fb(2))
    await drain(trainer)
    await world.submit(sessions[0], STEP)
    await drain(trainer)
    await trainer.park_all()

    snapshots = [(await world.session(session)).snapshot for session in sessions]
    assert [snapshot.seq for snapshot in snapshots if snapshot is not None] == [4, 2]
    for session in sessions:
        await world.submit(session, fb(3))
    assert await drain(world.trainer(ScriptedBackend(world.base))) == 2  # the clock stands: all leases were given back


async def test_the_sessions_of_a_dead_process_are_taken_over_without_waiting_for_their_leases(world: World) -> None:
    session = await world.open()
    (operation,) = await world.submit(session, fb(1))
    script = "from gateway.processes import own_name; print(own_name())"
    dead = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    name = (await dead.communicate())[0].decode().strip()
    async with world.database.write() as unit:
        work = await unit.work.claim(owner=name, base_model=world.base.name, lease_s=LEASE_S, at=world.clock.now())
    assert work is not None
    trainer = world.trainer(ScriptedBackend(world.base))
    running = asyncio.create_task(trainer.run())
    seen = 0
    async with asyncio.timeout(20):
        while not (await world.read(operation)).final:
            seen = await world.database.wakeups.wait(seen, 1.0)
    trainer.stop()
    await running

    assert (await world.read(operation)).status is Status.COMPLETED
