"""Pools over the session's engines, and a database of a test's own."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gateway.core.catalog import BaseModel, Catalog
from gateway.core.clock import SystemClock
from gateway.core.sampling import Target
from gateway.engines.launch import launch_scripted
from gateway.engines.pool import EnginePool
from gateway.store import SqlDatabase, open_database
from gateway.store.artifacts import LocalArtifacts
from tests.engines.fixtures import EngineProcess, base_model_of, endpoint_of, running_engine, scripted_spec
from tests.stack import EngineEndpoint
from tests.store.bench import Bench, HandClock, open_bench
from tests.store.conftest import sqlite_template, sqlite_url

__all__ = ["sqlite_template", "sqlite_url"]


@pytest.fixture
async def database(sqlite_url: str, tmp_path: Path) -> AsyncIterator[SqlDatabase]:
    async with open_database(sqlite_url, blob_dir=tmp_path / "blobs", clock=SystemClock()) as opened:
        yield opened


@pytest.fixture
async def bench(database: SqlDatabase) -> Bench:
    return await open_bench(database, HandClock())


@pytest.fixture
def artifacts(tmp_path: Path) -> LocalArtifacts:
    return LocalArtifacts(tmp_path / "artifacts")


@pytest.fixture
def base(scripted_engine: EngineEndpoint) -> BaseModel:
    return base_model_of(scripted_engine)


@pytest.fixture
async def pool(
    scripted_engine: EngineEndpoint, base: BaseModel, artifacts: LocalArtifacts
) -> AsyncIterator[EnginePool]:
    catalog = Catalog(models={base.name: base})
    async with EnginePool(catalog, artifacts, key=scripted_engine.key, timeout_s=30) as opened:
        yield opened


@pytest.fixture
def base_target(base: BaseModel) -> Target:
    return Target(base=base, version=None)


@pytest.fixture
def own_engine(tmp_path: Path) -> Iterator[tuple[EngineProcess, EngineEndpoint]]:
    """A scripted engine of one test, to be killed and started again; 5 ms a token."""
    spec = scripted_spec()
    launch = launch_scripted(spec, token_delay_ms=5)
    with running_engine(launch, spec.url, tmp_path / "engine.log") as process:
        yield process, endpoint_of(spec, vocab_size=256)
