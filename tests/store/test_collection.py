"""What is thrown away, and above all what is not."""

from datetime import timedelta
from pathlib import Path

import pytest

from gateway.collector import Collector
from gateway.core.bodies import Body
from gateway.core.errors import NotFound
from gateway.core.ids import ProjectId
from gateway.core.payloads import ForwardBackward, OptimStep
from gateway.core.sessions import Snapshot
from gateway.store import LocalArtifacts
from gateway.store.blobs import LARGEST_ROW_BYTES, UNNAMED
from gateway.store.collection import blob_columns
from gateway.store.tables import metadata
from tests.store.bench import Bench, forward_backward, forward_result

AN_HOUR = UNNAMED.total_seconds() + 1
A_DAY = timedelta(hours=24).total_seconds() + 1


async def collect(bench: Bench, tmp_path: Path) -> None:
    artifacts = LocalArtifacts(tmp_path / "artifacts")
    await Collector(bench.database, artifacts, bench.clock, "test").collect()


async def run(bench: Bench, *payloads: ForwardBackward | OptimStep) -> list[str]:
    """Run ``payloads`` in a new session; return the digests of their bodies."""
    session = await bench.open()
    digests: list[str] = []
    for payload in payloads:
        digests.append((await bench.submit(session, payload)).payload_digest)
        await bench.run_one(outcome=forward_result() if isinstance(payload, ForwardBackward) else None)
    return digests


async def has(bench: Bench, digest: str) -> bool:
    async with bench.database.read() as unit:
        try:
            await unit.blobs.get(bench.project_id, digest)
        except NotFound:
            return False
    return True


def test_every_column_that_names_a_blob_is_looked_at() -> None:
    told = {
        column for table in metadata.sorted_tables for column in table.columns if "in blobs" in (column.comment or "")
    }
    assert len(told) >= 3
    assert told <= set(blob_columns())


async def test_bodies_go_only_when_a_snapshot_lies_behind_them(bench: Bench, tmp_path: Path) -> None:
    session = await bench.open()
    digests = [(await bench.submit(session, forward_backward(first=n))).payload_digest for n in (1, 2, 3)]
    await bench.run_one(outcome=forward_result())
    work = await bench.claimed()
    await bench.finish(work, forward_result())
    bench.clock.advance(AN_HOUR)
    await collect(bench, tmp_path)
    without_snapshot = [await has(bench, digest) for digest in digests]
    async with bench.database.write() as unit:
        await unit.work.snapshot_taken(work.lease, Snapshot(seq=1, location="snap-1"), made_with={})
    await collect(bench, tmp_path)

    assert without_snapshot == [True, True, True]
    assert [await has(bench, digest) for digest in digests] == [False, True, True]
    retry = await bench.submit(session, forward_backward(first=1), seq=1)
    assert retry.seq == 1  # it is known without its body


async def test_a_body_that_two_operations_share_stays_for_the_second(bench: Bench, tmp_path: Path) -> None:
    first, second = await bench.open(), await bench.open()
    digest = (await bench.submit(first, forward_backward())).payload_digest
    await bench.submit(second, forward_backward())
    async with bench.database.write() as unit:
        await unit.sessions.stop(bench.project_id, first.id, bench.clock.now())
    bench.clock.advance(AN_HOUR)
    await collect(bench, tmp_path)
    shared = await has(bench, digest)
    async with bench.database.write() as unit:
        await unit.sessions.stop(bench.project_id, second.id, bench.clock.now())
    await collect(bench, tmp_path)

    assert (shared, await has(bench, digest)) == (True, False)


async def test_results_can_be_read_for_a_day_and_then_say_that_they_are_gone(bench: Bench, tmp_path: Path) -> None:
    session = await bench.open()
    await bench.submit(session, forward_backward())
    passed = await bench.run_one(outcome=forward_result())
    await bench.submit(session, OptimStep())
    stepped = await bench.run_one()
    bench.clock.advance(A_DAY - 5)
    await collect(bench, tmp_path)
    within = await bench.operation(passed.id)
    bench.clock.advance(10)
    await collect(bench, tmp_path)

    assert within == passed
    with pytest.raises(NotFound, match="kept for a day") as gone:
        await bench.operation(passed.id)
    assert gone.value.code == "result_expired"
    assert await bench.operation(stepped.id) == stepped  # small results stay


async def test_a_blob_that_is_stored_again_is_young_again(bench: Bench, tmp_path: Path) -> None:
    large = bytes(LARGEST_ROW_BYTES + 1)
    async with bench.database.write() as unit:
        digests = [await unit.blobs.put(bench.project_id, content) for content in (b"small", large)]
    bench.clock.advance(AN_HOUR)
    async with bench.database.write() as unit:
        for content in (b"small", large):
            await unit.blobs.put(bench.project_id, content)
    await collect(bench, tmp_path)
    again = [await has(bench, digest) for digest in digests]
    bench.clock.advance(AN_HOUR)
    await collect(bench, tmp_path)

    assert again == [True, True]
    assert [await has(bench, digest) for digest in digests] == [False, False]
    assert not [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()]


async def test_a_blob_named_between_look_and_removal_stays(bench: Bench) -> None:
    session = await bench.open()
    body = Body.of(forward_backward())
    digest = body.digest
    async with bench.database.write() as unit:
        await unit.blobs.add(bench.project_id, body)
    bench.clock.advance(AN_HOUR)
    async with bench.database.read() as unit:
        names, _ = await unit.collection.unneeded(after=None, limit=100, at=bench.clock.now())
    await bench.submit(session, forward_backward())
    async with bench.database.write() as unit:
        removed = await unit.collection.remove(names, at=bench.clock.now())

    assert (ProjectId(bench.project_id), digest) in names
    assert (removed, await has(bench, digest)) == (0, True)


async def test_snapshots_go_with_their_session_and_versions_never(bench: Bench, tmp_path: Path) -> None:
    artifacts = tmp_path / "artifacts"
    for name in ("snap-live", "snap-ended"):
        (artifacts / name).mkdir(parents=True)
    sessions = [await bench.open() for _ in range(2)]
    for session, name in zip(sessions, ("snap-live", "snap-ended"), strict=True):
        await bench.submit(session)
        work = await bench.claimed()
        await bench.finish(work)
        async with bench.database.write() as unit:
            await unit.work.snapshot_taken(work.lease, Snapshot(seq=1, location=name), made_with={})
    async with bench.database.write() as unit:
        await unit.sessions.stop(bench.project_id, sessions[1].id, bench.clock.now())
    await collect(bench, tmp_path)

    assert [path.name for path in artifacts.glob("[!.]*")] == ["snap-live"]
    assert (await bench.session(sessions[1])).snapshot is None
    assert (await bench.session(sessions[0])).snapshot == Snapshot(seq=1, location="snap-live")
