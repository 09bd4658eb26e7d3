"""``python -m trainer`` as a process, killed and started again."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.core.catalog import BaseModel
from gateway.core.operations import Operation, Status
from gateway.core.payloads import OptimStep, Payload, Publish, SaveWeights
from gateway.store import open_database
from gateway.store.artifacts import describe_files
from tests.trainer.builders import A, batch, forward_backward, lora
from tests.trainer.conftest import make_backend
from tests.trainer.world import HandClock, World, make_world
from trainer.kernels import Kernels
from trainer.settings import TrainerSettings

SAVE = SaveWeights(group="policy", publish=Publish.LAZY)
STEP = OptimStep(learning_rate=1e-2)
WITHOUT_TORCH = """
import sys
for name in ("torch", "transformers", "peft", "safetensors", "fastapi"):
    sys.modules[name] = None
from trainer.__main__ import main
sys.exit(main(["--backend", "scripted"]))
"""


@pytest.fixture
async def here(migrated: Path, base: BaseModel, kernels: Kernels, tmp_path: Path) -> AsyncIterator[World]:
    """A world whose files lie where a trainer process with ``data_dir`` = tmp_path looks for them."""
    shutil.copy(migrated, tmp_path / "loopline.db")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "catalog.toml").write_text(catalog(base))
    settings = TrainerSettings(data_dir=tmp_path)
    async with open_database(settings.resolved_database_url, blob_dir=settings.blob_dir) as database:
        yield await make_world(database, kernels, HandClock(), base, settings.artifact_dir)


def catalog(base: BaseModel) -> str:
    return "\n".join(
        [
            f"[models.{base.name}]",
            f"path = {json.dumps(str(base.path))}",
            f'dtype = "{base.dtype}"',
            f"vocab_size = {base.vocab_size}",
            f"context_length = {base.context_length}",
            f"max_lora_rank = {base.max_lora_rank}",
            f"max_loras = {base.max_loras}",
            "engines = []",
        ]
    )


@contextmanager
def trainer_process(data_dir: Path, *command: str) -> Iterator["subprocess.Popen[bytes]"]:
    env = os.environ | {
        "LOOPLINE_DATA_DIR": str(data_dir),
        "LOOPLINE_THREADS": "1",
        "LOOPLINE_LEASE_S": "1",
        "LOOPLINE_HEARTBEAT_S": "0.2",
        "LOOPLINE_MICRO_BATCH_TOKENS": "128",
    }
    process = subprocess.Popen([sys.executable, *command], env=env, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def finished(world: World, *operations: Operation) -> list[Operation]:
    seen = 0
    while not all([(await world.read(operation)).final for operation in operations]):
        seen = await world.database.wakeups.wait(seen, 5.0)
    return [await world.read(operation) for operation in operations]


async def test_a_killed_trainer_recovers_to_the_same_bits(here: World, tmp_path: Path) -> None:
    session = await here.open(lora(unembed=True))
    before: list[Payload] = [forward_backward(batch(1)), STEP, forward_backward(batch(2))]
    with trainer_process(tmp_path, "-m", "trainer") as trainer:
        done = await finished(here, *await here.submit(session, *before))
        os.killpg(trainer.pid, signal.SIGKILL)
    assert [operation.status for operation in done] == [Status.COMPLETED] * 3
    with trainer_process(tmp_path, "-m", "trainer") as trainer:
        (_, saved) = await finished(here, *await here.submit(session, STEP, SAVE))
        trainer.send_signal(signal.SIGTERM)
        assert trainer.wait(timeout=30) == 0
    assert saved.status is Status.COMPLETED
    (version,) = await here.versions()

    uninterrupted = make_backend(here.base)
    uninterrupted.open(A, session.lora)
    for seed in (1, 2):
        uninterrupted.forward_backward(A, forward_backward(batch(seed)))
        uninterrupted.optim_step(A, STEP)
    expected = tmp_path / "expected"
    expected.mkdir()
    canary = uninterrupted.write_adapter(A, expected)
    manifest = here.artifacts.verify(version.location, version.manifest_sha256)
    assert manifest.files == describe_files(expected)
    assert manifest.canary == canary
    assert await here.trained_tokens() == 2 * sum((24, 9, 17, 24))


async def test_the_scripted_trainer_needs_no_torch_and_stops_when_told(here: World, tmp_path: Path) -> None:
    session = await here.open()
    operations = await here.submit(session, forward_backward(batch(1)), STEP, SAVE)

    with trainer_process(tmp_path, "-c", WITHOUT_TORCH) as trainer:
        done = await finished(here, *operations)
        trainer.send_signal(signal.SIGTERM)
        status = trainer.wait(timeout=30)

    assert [operation.status for operation in done] == [Status.COMPLETED] * 3
    assert status == 0
    assert (await here.session(session)).snapshot is not None


def test_a_trainer_without_a_catalogue_says_so_and_exits_with_2(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "--backend", "scripted"],
        env=os.environ | {"LOOPLINE_DATA_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 2
    assert "catalog.toml" in done.stderr
