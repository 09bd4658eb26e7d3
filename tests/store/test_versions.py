"""Versions: numbers without gaps, the gate's verdict, addresses."""

import asyncio

import pytest

from gateway.core.errors import Conflict, Kind, NotFound
from gateway.core.ids import VersionId, new_version_id
from gateway.core.operations import Status
from gateway.core.payloads import Publish, SaveState, SaveWeights
from gateway.core.results import Failure, SaveResult
from gateway.core.versions import Group, VersionFilter, VersionKind, VersionState
from gateway.store import SqlDatabase
from tests.store.bench import LORA, REPORT, Bench, HandClock, new_version, open_bench

MISMATCH = Failure(
    kind=Kind.INTERNAL, code="canary_mismatch", message="mean 0.5, max 2.0 nats", details={"mean": 0.5, "max": 2.0}
)


async def publish(bench: Bench, version_id: VersionId) -> None:
    async with bench.database.write() as unit:
        await unit.versions.publish(version_id, REPORT, at=bench.clock.now())


async def reject(bench: Bench, version_id: VersionId) -> None:
    async with bench.database.write() as unit:
        await unit.versions.reject(version_id, MISMATCH, at=bench.clock.now())


async def test_a_staged_version_waits_for_the_gate_while_its_operation_runs(bench: Bench) -> None:
    session = await bench.open()
    saved = await bench.save(session)

    async with bench.database.read() as unit:
        version = await unit.versions.get(bench.project_id, saved.version_id)
        waiting = await unit.versions.awaiting_publication(10)
    now = await bench.session(session)

    assert (version.state, version.number, version.address) == (VersionState.STAGED, 1, "policy@1")
    assert (version.lora, version.seq, version.session_id, version.parent_id) == (LORA, 1, session.id, None)
    assert waiting == [version]
    assert (await bench.operation(version.operation_id)).status is Status.RUNNING
    assert (now.applied_seq, now.latest_version_id) == (1, None)


async def test_publishing_completes_the_save_and_moves_latest(bench: Bench) -> None:
    session = await bench.open()
    saved = await bench.save(session)
    bench.clock.advance(1)

    await publish(bench, saved.version_id)

    async with bench.database.read() as unit:
        version = await unit.versions.get(bench.project_id, saved.version_id)
        assert await unit.versions.awaiting_publication(10) == []
    operation = await bench.operation(version.operation_id)
    assert (version.state, version.canary, version.published_at) == (
        VersionState.PUBLISHED,
        REPORT,
        bench.clock.now(),
    )
    assert (operation.status, operation.outcome) == (Status.COMPLETED, saved)
    assert (await bench.session(session)).latest_version_id == saved.version_id


async def test_a_rejected_version_fails_its_save_and_latest_stays(bench: Bench) -> None:
    session = await bench.open()
    good = await bench.save(session)
    await publish(bench, good.version_id)
    bad = await bench.save(session)

    await reject(bench, bad.version_id)

    async with bench.database.read() as unit:
        version = await unit.versions.get(bench.project_id, bad.version_id)
    operation = await bench.operation(version.operation_id)
    assert (version.state, version.parent_id) == (VersionState.REJECTED, good.version_id)
    assert (operation.status, operation.outcome) == (Status.FAILED, MISMATCH)
    assert (await bench.session(session)).latest_version_id == good.version_id


async def test_latest_moves_forward_only(bench: Bench) -> None:
    session = await bench.open()
    first, second = await bench.save(session), await bench.save(session)

    await publish(bench, second.version_id)
    await publish(bench, first.version_id)

    assert (await bench.session(session)).latest_version_id == second.version_id


async def test_a_verdict_stands(bench: Bench) -> None:
    session = await bench.open()
    good, bad = await bench.save(session), await bench.save(session)
    await publish(bench, good.version_id)
    await reject(bench, bad.version_id)
    bench.clock.advance(5)

    await publish(bench, good.version_id)
    await reject(bench, bad.version_id)
    with pytest.raises(Conflict):
        await publish(bench, bad.version_id)
    with pytest.raises(Conflict):
        await reject(bench, good.version_id)

    async with bench.database.read() as unit:
        version = await unit.versions.get(bench.project_id, good.version_id)
    assert version.published_at is not None
    assert version.published_at < bench.clock.now()


async def test_a_version_nobody_staged_cannot_be_judged(bench: Bench) -> None:
    for judge in (publish, reject):
        with pytest.raises(NotFound):
            await judge(bench, new_version_id())


async def test_a_lazy_save_completes_when_staged_and_is_published_at_first_use(bench: Bench) -> None:
    session = await bench.open()
    await bench.submit(session, SaveWeights(group="named", publish=Publish.LAZY))
    saved = await bench.stage(await bench.claimed(), complete=True, version=new_version(1, group="named"))

    async with bench.database.read() as unit:
        assert await unit.versions.awaiting_publication(10) == []
        version = await unit.versions.by_address(bench.project_id, "named", 1)
    done = await bench.operation(version.operation_id)
    await publish(bench, saved.version_id)

    assert (done.status, done.outcome) == (Status.COMPLETED, saved)
    assert await bench.operation(version.operation_id) == done
    assert (await bench.session(session)).latest_version_id == saved.version_id


async def test_staging_again_returns_the_version_already_there(bench: Bench) -> None:
    await bench.submit(await bench.open(), SaveWeights(group="policy"))
    work = await bench.claimed()
    version = new_version(1)

    assert await bench.stage(work, version=version) == await bench.stage(work, version=version)

    async with bench.database.read() as unit:
        assert len(await unit.versions.page(bench.project_id, VersionFilter(), limit=10, after=None)) == 1


async def test_racing_saves_into_one_group_are_numbered_without_gaps(bench: Bench) -> None:
    works = []
    for index in range(12):
        await bench.submit(await bench.open(), SaveWeights(group="shared"))
        works.append(await bench.claimed(f"trainer-{index}"))

    results = await asyncio.gather(*(bench.stage(work, version=new_version(1, group="shared")) for work in works))

    assert sorted(result.number for result in results) == list(range(1, 13))


async def test_a_save_that_is_rolled_back_leaves_no_gap(bench: Bench) -> None:
    await bench.submit(await bench.open(), SaveWeights(group="policy"))
    work = await bench.claimed()

    async def stage_and_break() -> SaveResult:
        async with bench.database.write() as unit:
            await unit.work.stage(work.lease, work.operation, new_version(1), complete=False, at=bench.clock.now())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await stage_and_break()
    assert (await bench.stage(work)).number == 1


async def test_groups_count_their_versions_and_name_the_latest_of_each_kind(bench: Bench) -> None:
    session = await bench.open()
    created = bench.clock.now()
    await publish(bench, (await bench.save(session)).version_id)
    await bench.submit(session, SaveState(group="policy"))
    await bench.stage(await bench.claimed(), complete=True, version=new_version(2, kind=VersionKind.STATE))
    await reject(bench, (await bench.save(session)).version_id)

    async with bench.database.read() as unit:
        groups = await unit.versions.groups(bench.project_id)
    assert groups == [
        Group(
            name="policy",
            versions=3,
            size_bytes=3 * 1234,
            created_at=created,
            latest={VersionKind.ADAPTER: 1, VersionKind.STATE: 2},
            aliases={},
        )
    ]


async def test_versions_are_listed_newest_first_page_by_page(bench: Bench) -> None:
    session = await bench.open()
    for group in ("a", "b", "a", "a"):
        bench.clock.advance(1)
        await bench.save(session, complete=True, group=group)

    async with bench.database.read() as unit:
        first = await unit.versions.page(bench.project_id, VersionFilter(group="a"), limit=2, after=None)
        rest = await unit.versions.page(bench.project_id, VersionFilter(group="a"), limit=2, after=first[-1].id)
        everything = await unit.versions.page(bench.project_id, VersionFilter(), limit=10, after=None)
    assert [version.address for version in [*first, *rest]] == ["a@3", "a@2", "a@1"]
    assert [version.address for version in everything] == ["a@3", "a@2", "b@1", "a@1"]


async def test_a_strangers_version_is_missing(database: SqlDatabase, bench: Bench, clock: HandClock) -> None:
    stranger = await open_bench(database, clock, "other")
    saved = await bench.save(await bench.open())

    async with database.read() as unit:
        with pytest.raises(NotFound) as theirs:
            await unit.versions.get(stranger.project_id, saved.version_id)
        with pytest.raises(NotFound) as by_address:
            await unit.versions.by_address(stranger.project_id, "policy", 1)
        with pytest.raises(NotFound) as nobodys:
            await unit.versions.by_address(bench.project_id, "policy", 2)
        assert await unit.versions.groups(stranger.project_id) == []
        assert await unit.versions.page(stranger.project_id, VersionFilter(group="policy"), limit=9, after=None) == []
    assert theirs.value.message == f"no version {saved.version_id!r}"
    assert by_address.value.message.replace("@1", "@2") == nobodys.value.message


@pytest.mark.parametrize(("group", "number"), [("policy", 0), ("policy", 2**63), ("a\x00", 1), ("x'", 1)])
async def test_an_address_that_cannot_exist_is_missing(bench: Bench, group: str, number: int) -> None:
    async with bench.database.read() as unit:
        with pytest.raises(NotFound):
            await unit.versions.by_address(bench.project_id, group, number)
