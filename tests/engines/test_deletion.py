"""Files of a deleted version: they stay while any gateway may still read them, and go then."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack

import pytest

from gateway.background import USED_FOR, Sweeper
from gateway.core.catalog import BaseModel, Catalog
from gateway.core.payloads import SaveWeights
from gateway.core.sampling import Generation, SampleRequest, SamplingParams, Target
from gateway.core.scripted import scripted_logprob
from gateway.core.versions import NewVersion, Version
from gateway.engines.pool import EnginePool
from gateway.keeper import Keeper
from gateway.store import LocalArtifacts, SqlDatabase
from tests.engines.artifacts import SEQUENCE, stage_scripted
from tests.engines.fixtures import EngineProcess, base_model_of, until
from tests.stack import EngineEndpoint
from tests.store.bench import Bench


@pytest.fixture
def base(own_engine: tuple[EngineProcess, EngineEndpoint]) -> BaseModel:
    """One version at a time."""
    return base_model_of(own_engine[1], max_loras=2)


@pytest.fixture
async def pools(
    own_engine: tuple[EngineProcess, EngineEndpoint], base: BaseModel, artifacts: LocalArtifacts
) -> AsyncIterator[tuple[EnginePool, EnginePool]]:
    """Those of two gateways in front of one engine."""
    async with AsyncExitStack() as opened:
        here, there = [
            await opened.enter_async_context(
                EnginePool(Catalog(models={base.name: base}), artifacts, key=own_engine[1].key, timeout_s=30)
            )
            for _ in range(2)
        ]
        yield here, there


async def published(bench: Bench, pool: EnginePool, version: Version) -> Version:
    """Record ``version`` as saved and published by a session of its own."""
    session = await bench.open(base_model=version.base_model)
    await bench.submit(session, SaveWeights(group=session.id))
    work = await bench.claim(base_model=version.base_model)
    assert work is not None
    same = {field.name: getattr(version, field.name) for field in dataclasses.fields(NewVersion)}
    await bench.stage(work, version=NewVersion(**{**same, "group": session.id, "seq": work.operation.seq}))
    report = await pool.publish(version)
    async with bench.database.write() as unit:
        await unit.versions.publish(version.id, report, at=bench.clock.now())
    async with bench.database.read() as unit:
        return await unit.versions.get(bench.project_id, version.id)


def sweeper(database: SqlDatabase, pool: EnginePool, artifacts: LocalArtifacts, bench: Bench) -> Sweeper:
    return Sweeper(database, pool, artifacts, bench.clock, gap_timeout_s=60, undelete_s=0)


async def test_files_stay_while_a_call_of_another_gateway_waits_for_its_turn(
    database: SqlDatabase,
    bench: Bench,
    pools: tuple[EnginePool, EnginePool],
    base: BaseModel,
    artifacts: LocalArtifacts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.engines.replica.QUIET_S", 0.05)
    here, there = pools
    long, short = [await published(bench, here, stage_scripted(artifacts, name)) for name in ("long", "short")]
    deletes, uses = [sweeper(database, pool, artifacts, bench) for pool in pools]

    async def ask(version: Version, tokens: int) -> Generation:
        params = SamplingParams(max_tokens=tokens, seed=3, ignore_eos=True)
        return await there.generate(Target(base=base, version=version), SampleRequest(prompt=SEQUENCE, params=params))

    first = asyncio.create_task(ask(long, 200))

    async def entered() -> bool:
        return there.slots()[0].in_use == 1

    await until(entered)
    waits = asyncio.create_task(ask(short, 8))
    await asyncio.sleep(0)
    async with database.write() as unit:
        await unit.registry.delete(bench.project_id, short.id, force=True, by=bench.key_id, at=bench.clock.now())
    bench.clock.advance(1)
    await uses.purge()

    seen = 0
    while not first.done():
        await deletes.purge()
        seen += 1
        assert artifacts.path(short.location).exists()
    (sequence,) = (await waits).sequences
    assert sequence.logprobs[0] == scripted_logprob("short", SEQUENCE[-1], sequence.tokens[0])
    assert seen > 10
    bench.clock.advance(USED_FOR.total_seconds())

    async def purged() -> bool:
        await deletes.purge()
        return not artifacts.path(short.location).exists()

    await until(purged)
    async with database.read() as unit:
        assert (await unit.versions.get(bench.project_id, short.id)).purged_at is not None


async def test_gateways_divide_an_engines_slots_and_take_them_back(
    pools: tuple[EnginePool, EnginePool], base: BaseModel, artifacts: LocalArtifacts
) -> None:
    here, _ = pools
    assert [slots.capacity for slots in here.slots()] == [8]
    here.share(2)
    assert [slots.capacity for slots in here.slots()] == [4]
    for name in "abcdef":
        await here.publish(stage_scripted(artifacts, name))
    assert [slots.loaded for slots in here.slots()] == [4]
    here.share(1)
    for name in "ghijkl":
        await here.publish(stage_scripted(artifacts, name))
    assert [slots.loaded for slots in here.slots()] == [8]


async def test_what_an_engine_holds_is_known_whoever_loaded_it(
    pools: tuple[EnginePool, EnginePool], artifacts: LocalArtifacts, own_engine: tuple[EngineProcess, EngineEndpoint]
) -> None:
    here, there = pools
    mine, theirs = stage_scripted(artifacts, "mine"), stage_scripted(artifacts, "theirs")
    await here.publish(mine)
    await there.publish(theirs)
    noted: list[Collection[str]] = []

    class Noting:
        def note_use(self, version_ids: Collection[str]) -> None:
            noted.append(version_ids)

    await Keeper(here, Noting()).keep()
    own_engine[0].stop()
    await Keeper(here, Noting()).keep()
    assert [{mine.id, theirs.id} <= set(held) for held in noted] == [True, False]
    assert noted[1] == frozenset()
