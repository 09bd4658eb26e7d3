"""Wake-ups cross connections and processes, and only what matters wakes anybody."""

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from gateway.store import SqlDatabase, open_database, wakeups
from tests.store.bench import Bench, HandClock, new_session, open_bench

_WRITER = """
import asyncio, sys
from pathlib import Path
from gateway.store import open_database
from tests.store.bench import HandClock, open_bench

async def main():
    async with open_database(sys.argv[1], blob_dir=Path(sys.argv[2])) as database:
        print("ready", flush=True)
        sys.stdin.readline()
        bench = await open_bench(database, HandClock())
        await bench.open()

asyncio.run(main())
"""


async def current(database: SqlDatabase) -> int:
    """Return the counter once nothing new comes."""
    seen = -1
    while (now := await database.wakeups.wait(seen, 0.2)) != seen:
        seen = now
    return seen


async def test_a_commit_wakes_a_waiter_on_another_connection_within_a_second(
    url: str, database: SqlDatabase, tmp_path: Path, clock: HandClock
) -> None:
    async with open_database(url, blob_dir=tmp_path / "blobs") as other:
        seen = await current(other)
        waiter = asyncio.create_task(other.wakeups.wait(seen, 30))
        await (await open_bench(database, clock)).open()

        assert await asyncio.wait_for(waiter, 1) != seen


async def test_a_patient_waiter_hears_of_it_too_and_slows_down_no_other(
    url: str, database: SqlDatabase, tmp_path: Path, clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeups, "PATIENT_POLL_S", 20.0)
    async with open_database(url, blob_dir=tmp_path / "blobs") as other:
        seen = await current(other)
        patient = asyncio.create_task(other.wakeups.wait(seen, 30, patient=True))
        await asyncio.sleep(0.1)  # its looks have begun
        hurried = asyncio.create_task(other.wakeups.wait(seen, 30))
        await (await open_bench(database, clock)).open()

        assert seen not in await asyncio.wait_for(asyncio.gather(patient, hurried), 5)


async def test_a_commit_wakes_a_waiter_of_its_own_process(bench: Bench) -> None:
    seen = await current(bench.database)
    waiter = asyncio.create_task(bench.database.wakeups.wait(seen, 30))
    await bench.open()

    assert await asyncio.wait_for(waiter, 1) != seen


async def test_a_commit_of_another_process_wakes_a_waiter_within_a_second(
    url: str, database: SqlDatabase, tmp_path: Path
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _WRITER,
        url,
        str(tmp_path / "blobs"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"ready\n"
        seen = await current(database)
        waiter = asyncio.create_task(database.wakeups.wait(seen, 30))
        process.stdin.write(b"go\n")
        await process.stdin.drain()

        assert await asyncio.wait_for(waiter, 1) != seen
    finally:
        process.stdin.close()
        assert await asyncio.wait_for(process.wait(), 10) == 0


async def test_a_change_between_two_waits_is_not_missed(bench: Bench) -> None:
    seen = await current(bench.database)
    await bench.open()

    assert await asyncio.wait_for(bench.database.wakeups.wait(seen, 30), 1) != seen


async def test_locks_and_heartbeats_wake_nobody(url: str, bench: Bench, tmp_path: Path) -> None:
    await bench.submit(await bench.open())
    await bench.claimed()
    async with open_database(url, blob_dir=tmp_path / "blobs") as other:
        seen, here = await current(other), await current(bench.database)
        async with bench.database.write() as unit:
            await unit.locks.hold("publisher", owner="a", lease_s=5, at=bench.clock.now())
            await unit.work.renew(owner="trainer-a", lease_s=5, at=bench.clock.now())

        assert await other.wakeups.wait(seen, 0.3) == seen
        assert await bench.database.wakeups.wait(here, 0.1) == here


async def test_a_rolled_back_unit_wakes_nobody(bench: Bench) -> None:
    seen = await current(bench.database)
    with suppress(ZeroDivisionError):
        async with bench.database.write() as unit:
            await unit.keys.ensure_project("other")
            session = new_session(bench.project_id, bench.key_id, bench.clock.now())
            await unit.sessions.add(session, idempotency_key=None, request_digest="d")
            raise ZeroDivisionError

    assert await bench.database.wakeups.wait(seen, 0.3) == seen


async def test_a_wait_ends_with_its_timeout(database: SqlDatabase) -> None:
    seen = await current(database)
    loop = asyncio.get_running_loop()
    started = loop.time()

    assert await database.wakeups.wait(seen, 0.1) == seen
    assert 0.09 <= loop.time() - started < 1
