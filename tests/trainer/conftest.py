"""The tiny model with 512 tokens: big enough to have every part, small enough for milliseconds."""

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

import migrations
from gateway.core.catalog import BaseModel
from gateway.store import open_database
from tests.postgres import postgres
from tests.store.conftest import postgres_url, shared_postgres_url
from tests.tiny_model import cached_tiny_model
from tests.trainer.builders import VOCAB, tiny_base
from tests.trainer.world import HandClock, World, make_world
from trainer.kernels import Kernels
from trainer.peft_backend import PeftBackend, configure_torch

__all__ = ["postgres", "postgres_url", "shared_postgres_url"]

ON_BOTH = pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)


@pytest.fixture(scope="session", autouse=True)
def _deterministic_torch() -> None:
    configure_torch(threads=1)


@pytest.fixture(scope="session")
def model_dir() -> Path:
    return cached_tiny_model(vocab_size=VOCAB, seed=11)


@pytest.fixture(scope="session")
def base(model_dir: Path) -> BaseModel:
    return tiny_base(model_dir)


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where numerics are computed: every test that asks for it also runs on a CUDA device (``pytest -m gpu``)."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device(request.param)


@pytest.fixture
def backend(base: BaseModel, device: torch.device) -> PeftBackend:
    return make_backend(base, device=device)


CPU = torch.device("cpu")


def make_backend(
    base: BaseModel, micro_batch_tokens: int = 128, *, max_on_device: int = 16, device: torch.device = CPU
) -> PeftBackend:
    return PeftBackend(
        base,
        device=device,
        compute_dtype=base.dtype,
        micro_batch_tokens=micro_batch_tokens,
        max_on_device=max_on_device,
    )


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("migrated") / "loopline.db"
    migrations.upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def kernels() -> Iterator[Kernels]:
    with Kernels() as running:
        yield running


@pytest.fixture
def database_url(request: pytest.FixtureRequest, migrated: Path, tmp_path: Path) -> str:
    """A migrated database without rows: a SQLite file, or what ``ON_BOTH`` asks for."""
    if getattr(request, "param", "sqlite") == "postgresql":
        return request.getfixturevalue("postgres_url")
    shutil.copy(migrated, tmp_path / "loopline.db")
    return f"sqlite:///{tmp_path / 'loopline.db'}"


@pytest.fixture
async def world(database_url: str, base: BaseModel, kernels: Kernels, tmp_path: Path) -> AsyncIterator[World]:
    clock = HandClock()
    async with open_database(database_url, blob_dir=tmp_path / "blobs", clock=clock) as database:
        await kernels.run(lambda: configure_torch(threads=1))
        yield await make_world(database, kernels, clock, base, tmp_path / "artifacts")
