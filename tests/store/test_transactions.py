"""Units of work: shared commits, isolation of one from the other, cancellation, failure."""

import asyncio
import os
import shutil
import sqlite3
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import Connection, make_url, text
from sqlalchemy.exc import OperationalError

import migrations
from gateway.core.clock import SystemClock
from gateway.core.errors import Unavailable
from gateway.core.ports import UnitOfWork
from gateway.core.sessions import Session
from gateway.store import SqlDatabase, UnfitDatabase, open_database
from gateway.store import writer as writer_module
from gateway.store.sqlite import SqliteTransactions
from tests.postgres import PostgresServer, find_binaries, start_postgres, stop_postgres
from tests.store.bench import HandClock, open_bench


async def projects(database: SqlDatabase) -> list[str]:
    """Return the names of the projects, as a fresh reader sees them."""
    async with database.read() as unit:
        transaction = unit.keys._transaction  # pyright: ignore[reportPrivateUsage]
        rows = await transaction.rows(text("SELECT name FROM projects ORDER BY name"))
    return [row["name"] for row in rows]


async def add(database: SqlDatabase, name: str) -> None:
    async with database.write() as unit:
        await unit.keys.ensure_project(name)


def swap_head(file: Path, head: bytes) -> bytes:
    """Write ``head`` over the first bytes of ``file``; return those."""
    with file.open("r+b") as opened:
        before = opened.read(len(head))
        opened.seek(0)
        opened.write(head)
    return before


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A directory that the server's user can enter."""
    directory = Path(tempfile.mkdtemp(prefix="loopline-pg-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
async def sqlite(sqlite_url: str, tmp_path: Path) -> AsyncIterator[SqlDatabase]:
    async with open_database(sqlite_url, blob_dir=tmp_path / "blobs") as database:
        yield database


async def test_concurrent_units_share_their_commits(sqlite: SqlDatabase) -> None:
    before = sqlite.commits

    await asyncio.gather(*(add(sqlite, f"p{index:02}") for index in range(64)))

    assert sqlite.commits - before <= 64 // 8
    assert len(await projects(sqlite)) == 64


async def test_a_unit_on_its_own_is_committed_when_it_returns(sqlite: SqlDatabase) -> None:
    before = sqlite.commits
    await add(sqlite, "one")

    assert (sqlite.commits - before, await projects(sqlite)) == (1, ["one"])


async def test_units_that_need_not_last_cost_no_durable_commit_and_hold_up_none_that_must(
    database: SqlDatabase,
) -> None:
    async def add_either(index: int) -> None:
        async with database.write(durable=index % 3 == 0) as unit:
            await unit.keys.ensure_project(f"p{index:02}")

    before = database.commits
    async with database.write(durable=False) as unit:
        await unit.keys.ensure_project("fleeting")
    assert (database.commits - before, await projects(database)) == (0, ["fleeting"])

    await asyncio.gather(*(add_either(index) for index in range(30)))
    assert 1 <= database.commits - before <= 10
    assert len(await projects(database)) == 31


async def test_a_unit_returns_only_when_its_group_is_committed(sqlite: SqlDatabase) -> None:
    inside, leave = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        async with sqlite.write() as unit:
            await unit.keys.ensure_project("slow")
            inside.set()
            await leave.wait()

    first = asyncio.create_task(add(sqlite, "quick"))
    second = asyncio.create_task(slow())
    await inside.wait()

    assert not first.done()
    assert await projects(sqlite) == []
    leave.set()
    await asyncio.gather(first, second)
    assert await projects(sqlite) == ["quick", "slow"]


async def test_a_failing_unit_undoes_itself_and_nothing_else(database: SqlDatabase) -> None:
    async def fails() -> None:
        async with database.write() as unit:
            await unit.keys.ensure_project("bad")
            raise ZeroDivisionError

    outcomes = await asyncio.gather(
        *(fails() if index % 3 == 1 else add(database, f"good-{index}") for index in range(9)),
        return_exceptions=True,
    )

    assert [type(outcome) for outcome in outcomes].count(ZeroDivisionError) == 3
    assert await projects(database) == [f"good-{index}" for index in (0, 2, 3, 5, 6, 8)]


async def test_work_that_comes_whole_is_done_undone_and_committed_like_any_other(database: SqlDatabase) -> None:
    async def one(index: int) -> int:
        async def work(unit: UnitOfWork) -> int:
            await unit.keys.ensure_project(f"p{index}")
            if index % 3 == 1:
                raise ZeroDivisionError
            return index

        if index % 2:
            return await database.apply(work, durable=index % 4 == 1)
        async with database.write() as unit:
            return await work(unit)

    outcomes = await asyncio.gather(*(one(index) for index in range(12)), return_exceptions=True)

    good = [index for index in range(12) if index % 3 != 1]
    assert [outcome for outcome in outcomes if isinstance(outcome, int)] == good
    assert [type(outcome) for outcome in outcomes].count(ZeroDivisionError) == 4
    assert set(await projects(database)) == {f"p{index}" for index in good}
    assert set((await database.ask(lambda unit: unit.keys.projects())).values()) == {f"p{index}" for index in good}


async def test_a_glance_sees_what_was_committed_and_changes_nothing(database: SqlDatabase) -> None:
    await add(database, "one")

    assert "one" in (await database.glance(lambda unit: unit.keys.projects())).values()
    with pytest.raises(RuntimeError, match="only reads"):
        await database.glance(lambda unit: unit.keys.ensure_project("two"))
    assert await projects(database) == ["one"]


async def test_what_is_jotted_down_is_done_or_undone_like_any_other_unit(database: SqlDatabase) -> None:
    async def fails(unit: UnitOfWork) -> None:
        await unit.keys.ensure_project("bad")
        raise ZeroDivisionError

    await database.jot(lambda unit: unit.keys.ensure_project("one"))
    with pytest.raises(ZeroDivisionError):
        await database.jot(fails)
    await asyncio.gather(
        *(database.jot(lambda unit, n=n: unit.keys.ensure_project(f"p{n}")) for n in range(4)), add(database, "two")
    )

    assert await projects(database) == ["one", "p0", "p1", "p2", "p3", "two"]


async def test_a_jot_waits_for_what_is_being_written_here_and_by_another_process(
    sqlite: SqlDatabase, sqlite_url: str
) -> None:
    jotted: list[str] = []

    async def jot(name: str) -> None:
        await sqlite.jot(lambda unit: unit.keys.ensure_project(name))
        jotted.append(name)

    async with sqlite.write() as unit:
        await unit.keys.ensure_project("first")
        second = asyncio.create_task(jot("second"))
        await asyncio.sleep(0)
        assert not jotted
    await second
    other = sqlite3.connect(str(make_url(sqlite_url).database), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    third = asyncio.create_task(jot("third"))
    await asyncio.sleep(0)
    assert jotted == ["second"]
    other.close()
    await third

    assert jotted == ["second", "third"]
    assert await projects(sqlite) == ["first", "second", "third"]


async def test_a_unit_inside_a_jot_is_refused_and_never_done(sqlite: SqlDatabase) -> None:
    async def jots(unit: UnitOfWork) -> None:
        await unit.keys.ensure_project("outer")
        await sqlite.jot(lambda inner: inner.keys.ensure_project("inner"))

    async def applies(unit: UnitOfWork) -> None:
        await unit.keys.ensure_project("outer")
        await sqlite.apply(lambda inner: inner.keys.ensure_project("inner"))

    for work in (jots, applies):
        with pytest.raises(RuntimeError, match="inside another"):
            await sqlite.jot(work)

    await add(sqlite, "after")
    assert await projects(sqlite) == ["after"]


async def test_a_file_that_cannot_be_read_for_a_while_refuses_what_is_written_then_and_no_more(
    sqlite: SqlDatabase, sqlite_url: str
) -> None:
    file = Path(str(make_url(sqlite_url).database))
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("PRAGMA wal_checkpoint(TRUNCATE)").close()
    head = swap_head(file, b"not a database..")
    for write in (sqlite.jot, sqlite.apply):
        with pytest.raises(Unavailable):
            await write(lambda unit: unit.keys.ensure_project("lost"))
    with pytest.raises(Unavailable):
        await add(sqlite, "lost")

    swap_head(file, head)
    other.execute("PRAGMA user_version = 7")  # what others change is read again
    other.close()
    await sqlite.jot(lambda unit: unit.keys.ensure_project("jotted"))
    await add(sqlite, "later")
    assert await projects(sqlite) == ["jotted", "later"]


async def test_a_jot_costs_no_durable_commit_and_leaves_the_log_to_those_that_last(
    sqlite: SqlDatabase, sqlite_url: str
) -> None:
    database_file = str(make_url(sqlite_url).database)
    before = sqlite.commits, os.stat(database_file).st_mtime_ns

    for number in range(400):  # of about 4 pages each: the log would be copied to the file after 1000
        await sqlite.jot(lambda unit, n=number: unit.keys.ensure_project(f"p{n:03}"))

    assert (sqlite.commits, os.stat(database_file).st_mtime_ns) == before
    await add(sqlite, "lasting")
    assert os.stat(database_file).st_mtime_ns > before[1]
    assert len(await projects(sqlite)) == 401


async def test_what_sqlite_rolled_back_by_itself_is_not_acknowledged_though_its_work_went_on(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'small.db'}"
    migrations.upgrade(url)
    async with open_database(url, blob_dir=tmp_path) as database:

        def fill(connection: Connection) -> None:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
            connection.exec_driver_sql("INSERT INTO projects VALUES ('p', 'kept', 0)")
            with suppress(OperationalError):
                connection.exec_driver_sql("INSERT INTO projects VALUES ('q', hex(zeroblob(3000000)), 0)")

        with pytest.raises(Unavailable):
            await database.change(fill)
        await database.change(lambda connection: connection.exec_driver_sql("PRAGMA max_page_count = 1000000").close())
        await add(database, "later")
        assert await projects(database) == ["later"]


async def test_whole_units_share_their_commits(sqlite: SqlDatabase) -> None:
    before = sqlite.commits

    await asyncio.gather(*(sqlite.apply(lambda unit, n=n: unit.keys.ensure_project(f"p{n}")) for n in range(64)))

    assert sqlite.commits - before <= 64 // 8
    assert len(await projects(sqlite)) == 64


async def test_whole_work_that_waits_for_something_else_is_refused_and_undone(sqlite: SqlDatabase) -> None:
    async def waits(unit: UnitOfWork) -> None:
        await unit.keys.ensure_project("waiting")
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="waits for something"):
        await sqlite.apply(waits)

    assert await projects(sqlite) == []


async def test_a_caller_that_is_cancelled_while_its_work_runs_returns_when_that_is_over(sqlite: SqlDatabase) -> None:
    inside, leave = threading.Event(), threading.Event()

    async def slow(unit: UnitOfWork) -> None:
        inside.set()
        leave.wait()
        await unit.keys.ensure_project("slow")

    working = asyncio.create_task(sqlite.apply(slow))
    await asyncio.to_thread(inside.wait)
    working.cancel()
    queued = asyncio.create_task(sqlite.apply(lambda unit: unit.keys.ensure_project("never")))
    await asyncio.sleep(0)
    queued.cancel()
    leave.set()

    assert [type(one) for one in await asyncio.gather(working, queued, return_exceptions=True)] == [
        asyncio.CancelledError,
        asyncio.CancelledError,
    ]
    assert await projects(sqlite) == ["slow"]


async def test_a_cancelled_unit_undoes_itself_and_nothing_else(database: SqlDatabase) -> None:
    inside = asyncio.Event()

    async def hangs() -> None:
        async with database.write() as unit:
            await unit.keys.ensure_project("cancelled")
            inside.set()
            await asyncio.Event().wait()

    good = asyncio.create_task(add(database, "good"))
    hanging = asyncio.create_task(hangs())
    later = asyncio.create_task(add(database, "later"))
    await inside.wait()
    hanging.cancel()

    await asyncio.gather(good, later)
    with pytest.raises(asyncio.CancelledError):
        await hanging
    assert await projects(database) == ["good", "later"]


async def test_units_cancelled_at_any_moment_harm_no_other(database: SqlDatabase) -> None:
    """Cancel every other unit after a different number of event loop turns, statements in flight included."""

    async def victim(index: int) -> None:
        async with database.write() as unit:
            for step in range(5):
                await unit.keys.ensure_project(f"victim-{index}-{step}")

    async def cancelled_after(turns: int) -> None:
        task = asyncio.create_task(victim(turns))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    await asyncio.gather(
        *(cancelled_after(3 * index) for index in range(30)),
        *(add(database, f"good-{index:02}") for index in range(30)),
    )

    names = await projects(database)
    assert [name for name in names if name.startswith("good")] == [f"good-{index:02}" for index in range(30)]
    victims = [name for name in names if name.startswith("victim")]
    assert len(victims) % 5 == 0  # each is there as a whole or not at all


async def test_a_cancelled_read_gives_its_connection_back(database: SqlDatabase) -> None:
    async def read() -> None:
        await projects(database)

    for turns in range(40):
        task = asyncio.create_task(read())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    assert await asyncio.wait_for(projects(database), 5) == []


async def test_a_unit_inside_a_unit_is_refused_instead_of_waiting_for_itself(database: SqlDatabase) -> None:
    async with database.write():
        with pytest.raises(RuntimeError, match="inside another"):
            await add(database, "inner")

    await add(database, "after")


async def test_when_the_commit_fails_every_unit_of_the_group_is_told(
    sqlite: SqlDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(connection: Connection) -> None:
        connection.exec_driver_sql("SELECT * FROM disk_is_full")

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "commit", full)
        outcomes = await asyncio.gather(*(add(sqlite, f"p{index}") for index in range(5)), return_exceptions=True)

    assert {type(outcome) for outcome in outcomes} == {Unavailable}
    assert await projects(sqlite) == []
    await add(sqlite, "later")
    assert await projects(sqlite) == ["later"]


async def test_a_file_that_another_process_holds_too_long_is_unavailable(
    sqlite: SqlDatabase, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "LOCK_TIMEOUT_S", 0.05)
    other = sqlite3.connect(str(make_url(sqlite_url).database), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable) as refused:
        await add(sqlite, "waits")
    other.close()

    assert refused.value.code == "database_unavailable"
    await add(sqlite, "later")


async def test_an_idle_writer_leaves_the_file_to_other_processes(
    sqlite: SqlDatabase, sqlite_url: str, tmp_path: Path
) -> None:
    async with open_database(sqlite_url, blob_dir=tmp_path / "blobs") as other:
        for index in range(3):
            await add(sqlite, f"here-{index}")
            await add(other, f"there-{index}")

        assert len(await projects(sqlite)) == 6


async def test_two_busy_writers_of_one_file_both_get_their_turn(
    sqlite: SqlDatabase, sqlite_url: str, tmp_path: Path
) -> None:
    async with open_database(sqlite_url, blob_dir=tmp_path / "blobs") as other:
        await asyncio.gather(
            *(add(sqlite, f"here-{index}") for index in range(100)),
            *(add(other, f"there-{index}") for index in range(100)),
        )

        assert len(await projects(sqlite)) == 200


async def test_closing_waits_for_the_units_that_are_queued(sqlite_url: str, tmp_path: Path) -> None:
    async with open_database(sqlite_url, blob_dir=tmp_path / "blobs") as database:
        tasks = [asyncio.create_task(add(database, f"p{index}")) for index in range(5)]
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)

    async with open_database(sqlite_url, blob_dir=tmp_path / "blobs") as database:
        assert len(await projects(database)) == 5
    with pytest.raises(RuntimeError, match="closed"):
        await add(database, "late")


async def test_sqlite_runs_with_wal_and_full_fsync(sqlite: SqlDatabase) -> None:
    transactions = sqlite._transactions  # pyright: ignore[reportPrivateUsage]
    assert isinstance(transactions, SqliteTransactions)
    async with transactions.write() as transaction:
        pragmas = {
            name: (await transaction.rows(text(f"PRAGMA {name}")))[0][name]
            for name in ("journal_mode", "synchronous", "foreign_keys")
        }

    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}


@pytest.mark.parametrize(
    "url",
    [
        "sqlite+aiosqlite:///file.db",
        "sqlite:///:memory:",
        "sqlite:///file.db?cache=shared",
        "sqlite:///",
        "sqlite+pysqlcipher:///file.db",
        "mysql://host/name",
        "loopline.db",
    ],
)
async def test_a_database_that_cannot_be_durable_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(UnfitDatabase, match="URL must"):
        async with open_database(url, blob_dir=tmp_path):
            pass


async def test_a_wrong_statement_is_a_defect_and_not_a_database_that_is_away(sqlite: SqlDatabase) -> None:
    transactions = sqlite._transactions  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(OperationalError, match="no such table"):
        async with sqlite.read() as unit:
            await unit.keys._transaction.rows(text("SELECT * FROM nowhere"))  # pyright: ignore[reportPrivateUsage]
    assert transactions.commits == 0


async def test_a_server_that_went_away_is_unavailable_and_then_works_again(
    postgres: PostgresServer, postgres_url: str, tmp_path: Path, clock: HandClock
) -> None:
    async with open_database(postgres_url, blob_dir=tmp_path / "blobs", clock=clock) as database:
        seen = await database.wakeups.wait(0, 5)
        with postgres.connect() as connection:
            connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")

        await (await open_bench(database, clock)).open()  # the pool notices
        assert await asyncio.wait_for(database.wakeups.wait(seen, 30), 5) != seen  # the listener reconnects


async def test_a_process_that_stops_within_a_transaction_keeps_nobody_from_its_rows(
    postgres_url: str, tmp_path: Path, clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.store.postgres.ABANDONED_S", 0.3)
    async with open_database(postgres_url, blob_dir=tmp_path / "blobs", clock=clock) as database:
        bench = await open_bench(database, clock)
        session = await bench.open()

        async def stop(unit: UnitOfWork) -> Session:
            return await unit.sessions.stop(bench.project_id, session.id, clock.now())

        others: list[Session] = []

        async def freeze() -> None:
            async with database.write() as frozen:  # says nothing more until the other one is done
                await stop(frozen)
                async with asyncio.timeout(10):
                    others.append(await asyncio.create_task(database.apply(stop)))

        with pytest.raises(Unavailable):
            await freeze()

        async with database.read() as unit:
            assert [await unit.sessions.get(bench.project_id, session.id)] == others


@pytest.mark.parametrize("hours", [3, -3])
async def test_a_process_runs_with_the_servers_time_whatever_its_machines_clock_shows(
    postgres: PostgresServer, postgres_url: str, tmp_path: Path, hours: int
) -> None:
    clock = SystemClock(wall=lambda: datetime.now(UTC) + timedelta(hours=hours))
    async with open_database(postgres_url, blob_dir=tmp_path, clock=clock):
        with postgres.connect() as connection:
            row = connection.execute("SELECT clock_timestamp()").fetchone()
        assert row is not None
        assert abs(clock.now() - row[0]) < timedelta(seconds=10)


async def test_a_server_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        async with open_database(f"postgresql+psycopg://nobody@/x?host={tmp_path}", blob_dir=tmp_path):
            pass


async def test_a_server_that_comes_up_late_is_waited_for(postgres: PostgresServer, reachable: Path) -> None:
    binaries = find_binaries()
    assert binaries is not None
    stop_postgres(await asyncio.to_thread(start_postgres, reachable, binaries))
    url = f"postgresql+psycopg://postgres@/postgres?host={reachable}"
    opening = open_database(url, blob_dir=reachable / "blobs", wait_s=60.0, create=True)
    opened = asyncio.create_task(opening.__aenter__())
    server = await asyncio.to_thread(start_postgres, reachable, binaries)
    try:
        async with (await opened).read():
            pass
        await opening.__aexit__(None, None, None)
    finally:
        stop_postgres(server)


_ACKNOWLEDGER = """
import asyncio, sys
from pathlib import Path
from gateway.store import open_database

async def main():
    async with open_database(sys.argv[1], blob_dir=Path(sys.argv[2])) as database:
        async def write(lane):
            for index in range(10_000):
                async with database.write() as unit:
                    await unit.keys.ensure_project(f"p-{lane}-{index}")
                print(f"p-{lane}-{index}", flush=True)
        await asyncio.gather(*(write(lane) for lane in range(8)))

asyncio.run(main())
"""


async def test_what_a_killed_process_acknowledged_is_there(url: str, tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _ACKNOWLEDGER,
        url,
        str(tmp_path / "blobs"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert process.stdout is not None
    acknowledged = [await process.stdout.readline() for _ in range(60)]
    process.kill()
    acknowledged += [line for line in (await process.stdout.read()).splitlines(keepends=True) if line[-1:] == b"\n"]
    await process.wait()

    async with open_database(url, blob_dir=tmp_path / "blobs") as database:
        there = set(await projects(database))
    assert len(acknowledged) >= 60
    assert {line.decode().strip() for line in acknowledged} <= there


async def test_callers_that_leave_at_any_moment_stop_nobody_else(database: SqlDatabase) -> None:
    async def work(unit: UnitOfWork) -> str:
        return await unit.keys.ensure_project("one")

    for moments in range(12):
        leaving = [asyncio.create_task(database.apply(work)) for _ in range(3)]
        for _ in range(moments):
            await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        ended = await asyncio.gather(*leaving, return_exceptions=True)
        assert not [one for one in ended if isinstance(one, Exception)]
        assert await database.apply(work)
