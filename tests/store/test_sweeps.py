"""Deadlines that somebody has to meet count no time in which nobody could."""

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import make_url

from gateway.background import BREAK, RETURN, Sweeper
from gateway.core.catalog import Catalog
from gateway.core.errors import Unavailable
from gateway.core.ids import SampleId, new_sample_id
from gateway.core.operations import Operation
from gateway.core.ports import RunningSample
from gateway.core.results import Failure
from gateway.core.sessions import Session, SessionStatus
from gateway.engines.pool import EnginePool
from gateway.store import LocalArtifacts, writer
from gateway.wire.sampling_jobs import LEASE_S
from tests.store.bench import Bench

GAP_S = 90.0
EVERYTHING = ["sample", "session", "gap"]


class World:
    """A session with an operation that waits for seq 1, one that nobody uses, and a sample that nobody renews."""

    def __init__(self, bench: Bench, pool: EnginePool, artifacts: LocalArtifacts) -> None:
        self._parts = (bench.database, pool, artifacts, bench.clock)
        self._bench = bench
        self.waiting: Operation
        self.unused: Session
        self.sample_id: SampleId = new_sample_id()
        self.restart()

    async def begin(self) -> None:
        self.waiting = await self._bench.submit(await self._bench.open(), seq=2)
        self.unused = await self._bench.open(ttl_s=60, expires_at=self._bench.clock.now() + RETURN)
        sample = RunningSample(id=self.sample_id, key="k", request_digest="d", owner="gateway-a")
        async with self._bench.database.write() as unit:
            await unit.samples.begin(self._bench.project_id, sample, lease_s=LEASE_S)

    def restart(self) -> None:
        """Let another gateway do the sweeps."""
        self._sweeper = Sweeper(*self._parts, gap_timeout_s=GAP_S, undelete_s=0)

    async def pass_time(self, seconds: float) -> None:
        """Sweep often enough for ``seconds``, up to their end."""
        step = BREAK.total_seconds() / 2
        while seconds > 0:
            await self._sweeper.sweep()
            self._bench.clock.advance(min(step, seconds))
            seconds -= step
        await self._sweeper.sweep()

    async def given_up(self) -> list[str]:
        """Return what a deadline has passed for."""
        operation = await self._bench.operation(self.waiting.id)
        failed = isinstance(operation.outcome, Failure) and operation.outcome.code == "sequence_gap"
        expired = (await self._bench.session(self.unused)).status is SessionStatus.EXPIRED
        async with self._bench.database.read() as unit:
            lost = bool(await unit.samples.final_among([self.sample_id]))
        return [name for name, over in (("sample", lost), ("session", expired), ("gap", failed)) if over]


@pytest.fixture
async def world(bench: Bench, tmp_path: Path) -> AsyncIterator[World]:
    artifacts = LocalArtifacts(tmp_path / "artifacts")
    async with EnginePool(Catalog(models={}), artifacts, key="", timeout_s=1) as pool:
        world = World(bench, pool, artifacts)
        await world.begin()
        yield world


@pytest.mark.parametrize("back", ["awake", "restarted"])
async def test_what_was_due_while_the_gateway_was_away_is_given_up_only_after_its_time_with_it(
    bench: Bench, world: World, back: str
) -> None:
    bench.clock.advance(3600)
    if back == "restarted":
        world.restart()
    seen: list[list[str]] = []
    for seconds in (LEASE_S - 1, 1, RETURN.total_seconds() - LEASE_S - 1, 1, GAP_S - RETURN.total_seconds() - 1, 1):
        await world.pass_time(seconds)
        seen.append(await world.given_up())

    assert seen[1:] == [["sample"], ["sample"], ["sample", "session"], ["sample", "session"], EVERYTHING]
    assert seen[0] == ([] if back == "awake" else ["sample"])  # other gateways could renew without this one


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)  # whose lock can be held from here
async def test_time_in_which_the_database_was_away_counts_for_nothing(
    bench: Bench, world: World, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.pass_time(LEASE_S - 1)
    monkeypatch.setattr(writer, "LOCK_TIMEOUT_S", 0.05)
    other = sqlite3.connect(str(make_url(sqlite_url).database), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    for _ in range(int(BREAK.total_seconds()) + 1):
        bench.clock.advance(1)
        with pytest.raises(Unavailable):
            await world.pass_time(0)
    other.close()

    await world.pass_time(LEASE_S - 1)
    assert await world.given_up() == []
    await world.pass_time(1)
    assert await world.given_up() == ["sample"]


async def test_what_is_due_in_quiet_times_is_given_up_at_once(world: World) -> None:
    await world.pass_time(LEASE_S)
    assert await world.given_up() == ["sample"]
    await world.pass_time(RETURN.total_seconds() - LEASE_S)
    assert await world.given_up() == ["sample", "session"]
    await world.pass_time(GAP_S - RETURN.total_seconds() + 1)
    assert await world.given_up() == EVERYTHING
