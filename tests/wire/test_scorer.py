"""What becomes of a score whose asker gives up, and of one that cannot be computed."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import migrations
from gateway.core.clock import SystemClock
from gateway.core.errors import GatewayError, Kind, Unavailable
from gateway.core.futures import Futures
from gateway.core.operations import Status
from gateway.core.principals import ALL_SCOPES, Principal
from gateway.core.results import Failure
from gateway.core.scores import ScoreResult, score_targets
from gateway.core.tensors import TensorData
from gateway.store import open_database
from gateway.wire.scoring import Scorer
from tests.store.bench import BASE, MODEL, Bench, HandClock, open_bench

REQUEST = score_targets(MODEL, None, [1, 2], [2, 3])


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("migrated") / "loopline.db"
    migrations.upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture
async def bench(migrated: Path, tmp_path: Path) -> AsyncIterator[Bench]:
    shutil.copy(migrated, tmp_path / "loopline.db")
    clock = HandClock()
    async with open_database(f"sqlite:///{tmp_path}/loopline.db", blob_dir=tmp_path, clock=clock) as database:
        yield await open_bench(database, clock)


@pytest.fixture
async def keyed(bench: Bench) -> AsyncIterator[Scorer]:
    async with Futures(bench.database, bench.database.wakeups, lambda unit: unit.scores) as futures:
        yield scorer(bench, futures, "key")


def scorer(bench: Bench, futures: object, key: str | None) -> Scorer:
    return Scorer(
        database=bench.database,
        futures=futures,  # pyright: ignore[reportArgumentType]
        clock=SystemClock(),
        principal=Principal(project_id=bench.project_id, key_id=bench.key_id, scopes=ALL_SCOPES),
        idempotency_key=key,
        wait_s=0.0,
    )


async def finish(bench: Bench, outcome: ScoreResult | Failure) -> None:
    async with bench.database.write() as unit:
        work = await unit.score_work.claim(owner="t", base_model=BASE, lease_s=9.0, at=bench.clock.now())
        assert work is not None
        await unit.score_work.finish(work, outcome, facts=(), at=bench.clock.now())


async def test_a_pending_score_is_found_again_by_its_key(bench: Bench, keyed: Scorer) -> None:
    score = await keyed.ask(REQUEST, asked="a", session_id=None)
    with pytest.raises(Unavailable) as pending:
        await keyed.result(score)
    assert (pending.value.code, pending.value.details) == ("score_pending", {"status": "queued"})

    logprobs = TensorData.floats([-1.0, -2.0])
    await finish(bench, ScoreResult(logprobs=logprobs))
    known = await keyed.known("a")
    assert known is not None
    assert known.id == score.id
    assert await keyed.result(known) == ScoreResult(logprobs=logprobs)


async def test_a_score_that_nobody_could_ask_for_again_is_taken_back(bench: Bench, keyed: Scorer) -> None:
    unkeyed = scorer(bench, keyed.futures, None)
    score = await unkeyed.ask(REQUEST, asked="a", session_id=None)
    with pytest.raises(Unavailable):
        await unkeyed.result(score)

    async with bench.database.read() as unit:
        assert (await unit.scores.get(bench.project_id, score.id)).status is Status.CANCELLED
        assert not await unit.score_work.waiting(base_model=BASE, at=bench.clock.now())


async def test_a_failure_is_raised_as_what_it_is(bench: Bench, keyed: Scorer) -> None:
    score = await keyed.ask(REQUEST, asked="a", session_id=None)
    await finish(
        bench, Failure(kind=Kind.NOT_FOUND, code="unknown_version", message="no such version", field="version")
    )
    with pytest.raises(GatewayError) as refused:
        await keyed.result(score)
    assert (refused.value.kind, refused.value.code, refused.value.field) == (
        Kind.NOT_FOUND,
        "unknown_version",
        "version",
    )
