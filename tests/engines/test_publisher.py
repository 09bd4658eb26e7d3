"""The publisher on a real database and a real (scripted) engine: what it records, and when it records nothing."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import pytest

from gateway.core.catalog import Catalog
from gateway.core.clock import SystemClock
from gateway.core.operations import Operation, Status
from gateway.core.payloads import SaveWeights
from gateway.core.results import Failure, SaveResult
from gateway.core.scripted import SCRIPTED_NAME, scripted_file
from gateway.core.versions import NewVersion, Version, VersionState
from gateway.engines.pool import EnginePool
from gateway.publisher import LOCK, Publisher
from gateway.store import LocalArtifacts, SqlDatabase
from tests.engines.artifacts import stage_scripted
from tests.engines.fixtures import EngineProcess, base_model_of, until
from tests.stack import EngineEndpoint
from tests.store.bench import Bench

NAME = "scripted"


@pytest.fixture
async def own_pool(
    own_engine: tuple[EngineProcess, EngineEndpoint], artifacts: LocalArtifacts
) -> AsyncIterator[EnginePool]:
    base = base_model_of(own_engine[1])
    async with EnginePool(Catalog(models={base.name: base}), artifacts, key=own_engine[1].key, timeout_s=30) as opened:
        yield opened


def publisher(database: SqlDatabase, pool: EnginePool, owner: str = "gateway-1") -> Publisher:
    return Publisher(database, pool, database.wakeups, SystemClock(), owner)


async def staged(bench: Bench, version: Version) -> tuple[Version, Operation]:
    """Record ``version`` as the staged result of a running save_weights of a new session."""
    session = await bench.open(base_model=NAME)
    await bench.submit(session, SaveWeights(group="policy"))
    work = await bench.claim(base_model=NAME)
    assert work is not None
    same = {field.name: getattr(version, field.name) for field in dataclasses.fields(NewVersion)}
    await bench.stage(work, version=NewVersion(**{**same, "group": "policy", "seq": work.operation.seq}))
    return await recorded(bench, version), work.operation


async def recorded(bench: Bench, version: Version) -> Version:
    async with bench.database.read() as unit:
        return await unit.versions.get(bench.project_id, version.id)


async def finished(bench: Bench, operation: Operation) -> Operation:
    async def final() -> bool:
        return (await bench.operation(operation.id)).final

    await until(final)
    return await bench.operation(operation.id)


async def test_a_staged_version_is_published_and_becomes_latest(
    database: SqlDatabase, bench: Bench, pool: EnginePool, artifacts: LocalArtifacts
) -> None:
    async with publisher(database, pool):
        version, operation = await staged(bench, stage_scripted(artifacts, "mine"))  # wakes a waiting publisher
        done = await finished(bench, operation)

    assert done.status is Status.COMPLETED
    assert done.outcome == SaveResult(
        version_id=version.id, group="policy", number=1, seq=version.seq, optimizer_step=version.optimizer_step
    )
    version = await recorded(bench, version)
    assert version.state is VersionState.PUBLISHED
    assert version.canary is not None
    assert (version.canary.max_difference, version.canary.inconclusive) == (0.0, False)
    async with database.read() as unit:
        assert (await unit.sessions.get(bench.project_id, version.session_id)).latest_version_id == version.id


async def test_a_mismatch_fails_the_operation_with_both_numbers_and_latest_stays(
    database: SqlDatabase, bench: Bench, pool: EnginePool, artifacts: LocalArtifacts
) -> None:
    version, operation = await staged(bench, stage_scripted(artifacts, "mine", scored_as="other"))
    async with publisher(database, pool):
        done = await finished(bench, operation)

    assert done.status is Status.FAILED
    assert isinstance(done.outcome, Failure)
    assert done.outcome.code == "canary_mismatch"
    assert float(done.outcome.details["max"]) > float(done.outcome.details["allowed_max"])
    assert (await recorded(bench, version)).state is VersionState.REJECTED
    async with database.read() as unit:
        assert (await unit.sessions.get(bench.project_id, version.session_id)).latest_version_id is None


async def test_a_corrupt_artefact_is_rejected_and_hinders_nobody(
    database: SqlDatabase, bench: Bench, pool: EnginePool, artifacts: LocalArtifacts
) -> None:
    broken, broken_operation = await staged(bench, stage_scripted(artifacts, "broken"))
    (artifacts.path(broken.location) / SCRIPTED_NAME).write_bytes(scripted_file("changed"))
    _, good_operation = await staged(bench, stage_scripted(artifacts, "good"))

    async with publisher(database, pool):
        good, bad = await finished(bench, good_operation), await finished(bench, broken_operation)

    assert (good.status, bad.status) == (Status.COMPLETED, Status.FAILED)
    assert isinstance(bad.outcome, Failure)
    assert bad.outcome.code == "corrupt_artifact"


async def test_an_engine_that_is_away_rejects_nothing_and_the_version_is_published_when_it_is_back(
    database: SqlDatabase,
    bench: Bench,
    own_pool: EnginePool,
    own_engine: tuple[EngineProcess, EngineEndpoint],
    artifacts: LocalArtifacts,
) -> None:
    process, _ = own_engine
    version, operation = await staged(bench, stage_scripted(artifacts, "mine"))
    process.stop()
    one = publisher(database, own_pool)

    retry_in_s = await one.publish_waiting()

    assert 0 < retry_in_s <= 0.25
    assert (await recorded(bench, version)).state is VersionState.STAGED
    assert (await bench.operation(operation.id)).status is Status.RUNNING
    process.start()
    async with one:
        assert (await finished(bench, operation)).status is Status.COMPLETED


async def test_only_the_holder_of_the_lock_publishes_and_hands_it_over_when_it_ends(
    database: SqlDatabase, bench: Bench, pool: EnginePool, artifacts: LocalArtifacts
) -> None:
    first, second = publisher(database, pool, "gateway-1"), publisher(database, pool, "gateway-2")
    async with second:
        async with first:
            _, operation = await staged(bench, stage_scripted(artifacts, "mine"))
            assert (await finished(bench, operation)).status is Status.COMPLETED
        _, operation = await staged(bench, stage_scripted(artifacts, "next"))
        assert (await finished(bench, operation)).status is Status.COMPLETED
    async with database.write() as unit:
        assert await unit.locks.hold(LOCK, owner="gateway-3", lease_s=1, at=SystemClock().now())


async def test_a_publication_is_recorded_once_when_two_publishers_work_on_it(
    database: SqlDatabase, bench: Bench, pool: EnginePool, artifacts: LocalArtifacts
) -> None:
    version, operation = await staged(bench, stage_scripted(artifacts, "mine"))
    first, second = publisher(database, pool, "gateway-1"), publisher(database, pool, "gateway-2")

    await asyncio.gather(first.publish_waiting(), second.publish_waiting())

    assert (await bench.operation(operation.id)).status is Status.COMPLETED
    assert (await recorded(bench, version)).state is VersionState.PUBLISHED
