"""An artefact store, or a disk, that cannot be read for a while: the trainer waits, and nothing is lost or counted."""

import errno
from pathlib import Path

import pytest

from gateway.core.adapter_files import WEIGHTS_NAME
from gateway.core.errors import Unavailable
from gateway.core.ids import SessionId
from gateway.core.manifest import Manifest
from gateway.core.operations import Status
from gateway.core.payloads import LoadState, Publish, SaveState, SaveWeights, Upload
from gateway.core.sessions import ComputeRules, LoraConfig
from gateway.store import LocalArtifacts
from gateway.store.artifacts import describe_files
from tests.trainer.test_loop import STEP, fb, fingerprint_of, save_lazily
from tests.trainer.world import World, drain
from trainer import patience
from trainer.scripted import ScriptedBackend

AWAY = 3


class Away(LocalArtifacts):
    """Cannot read what begins with ``only``, ``times`` times."""

    def __init__(self, world: World, times: int = AWAY, only: str = "") -> None:
        super().__init__(world.artifacts.path("x").parent)
        self.times, self._only = times, only

    def verify(self, location: str, manifest_sha256: str | None) -> Manifest:
        if self.times and location.startswith(self._only):
            self.times -= 1
            raise Unavailable("the object store cannot be reached")
        return super().verify(location, manifest_sha256)


class Unreadable(ScriptedBackend):
    """On a disk that gives errors ``times`` times, after the files were hashed."""

    times = AWAY

    def restore(
        self, session_id: SessionId, lora: LoraConfig, directory: Path, rules: ComputeRules | None = None
    ) -> None:
        if self.times:
            self.times -= 1
            raise OSError(errno.EIO, "Input/output error")
        super().restore(session_id, lora, directory, rules)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_FIRST_PAUSE_S", 0.001)


@pytest.mark.parametrize("disk", [False, True], ids=["store", "disk"])
async def test_a_session_whose_snapshot_cannot_be_read_waits_for_it(world: World, disk: bool) -> None:
    session = await world.open()
    await world.submit(session, fb(1), STEP, fb(2))
    before = world.trainer(ScriptedBackend(world.base))
    await drain(before)
    await before.park_all()
    await world.submit(session, STEP, save_lazily())
    store = Away(world, 0 if disk else AWAY)
    backend = Unreadable(world.base) if disk else ScriptedBackend(world.base)

    assert await drain(world.trainer(backend, artifacts=store)) == 2

    assert (store.times, getattr(backend, "times", 0)) == (0, 0)
    assert await world.last_fingerprint() == await fingerprint_of(world, fb(1), STEP, fb(2), STEP)


async def test_loads_and_imports_wait_for_what_they_read(world: World) -> None:
    session = await world.open()
    await world.submit(session, fb(1), STEP, SaveState(group="policy"), fb(2))
    store = Away(world, 0)
    trainer = world.trainer(ScriptedBackend(world.base), artifacts=store)
    await drain(trainer)
    (state,) = await world.versions()
    staged = store.stage("upload-1")
    (staged / WEIGHTS_NAME).write_bytes(b"weights")
    files = describe_files(staged)
    manifest = Manifest(version_id="upload-1", kind="upload", base_model="", files=files, canary=None)
    upload = Upload(location="upload-1", manifest_sha256=store.commit(staged, manifest))
    imported = SaveWeights(group="policy", publish=Publish.LAZY, source=upload)

    for payload in (LoadState(version_id=state.id, optimizer=True), imported):
        (operation,) = await world.submit(session, payload)
        store.times = AWAY
        assert await drain(trainer) == 1
        assert store.times == 0
        assert (await world.read(operation)).status is Status.COMPLETED


@pytest.mark.parametrize("begun", [True, False], ids=["load", "rebuild"])
async def test_trainers_that_are_stopped_while_they_wait_are_no_losses_and_park_the_others(
    world: World, begun: bool
) -> None:
    waiting, other = await world.open(), await world.open()
    await world.submit(waiting, fb(1), STEP, SaveState(group="policy"))
    first = world.trainer(ScriptedBackend(world.base))
    await drain(first)
    await first.park_all()
    (state,) = await world.versions()
    loading = LoadState(version_id=state.id, optimizer=True)
    load, after, *_ = await world.submit(waiting, loading, fb(2), STEP, save_lazily())

    for _ in range(7):  # more than an operation or a session may lose
        (operation,) = await world.submit(other, fb(3))
        store = Away(world, 1000, "ver-" if begun else f"snapshot-{waiting.id}")
        trainer = world.trainer(ScriptedBackend(world.base), artifacts=store)
        trainer.stop()
        while store.times == 1000 or not (await world.read(operation)).final:
            world.clock.advance(0.001)
            assert await trainer.step()
        await trainer.park_all()
        assert (await world.session(waiting)).recovery is None
    await drain(world.trainer(ScriptedBackend(world.base)))  # the clock stands: all leases were given back

    for each in (load, after, operation):
        assert (await world.read(each)).status is Status.COMPLETED
    assert await world.last_fingerprint() == await fingerprint_of(world, fb(1), STEP, fb(2), STEP)
