"""What a start refuses, and how it says so: a database that may forget, settings that cannot be used."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from psycopg import sql
from sqlalchemy import Connection, Engine, event

from gateway.cli.checks import Verdict, check_database
from gateway.core.errors import Unavailable
from gateway.settings import Settings
from gateway.store import UnfitDatabase, WeakDurability, open_database
from gateway.store.tables import REVISION
from tests.postgres import TEMPLATE, PostgresServer

PROGRAMS = {"gateway": ["-m", "gateway"], "trainer": ["-m", "trainer", "--backend", "scripted"]}
CATALOG = """
[models.smollm2-135m-instruct]
path = "/nonexistent"
dtype = "float32"
vocab_size = 512
context_length = 64
max_lora_rank = 8
max_loras = 3
engines = []
"""


@pytest.fixture
def forgetful(postgres: PostgresServer) -> str:
    """The URL of a database that acknowledges before it writes."""
    database = postgres.create(template=TEMPLATE)
    with postgres.connect() as connection:
        connection.execute(sql.SQL("ALTER DATABASE {} SET synchronous_commit = off").format(sql.Identifier(database)))
    return postgres.url(database)


@contextmanager
def weak_server(server: PostgresServer, setting: str) -> Iterator[None]:
    """Run ``server`` with ``setting`` off, then as it was."""
    for statement, value in ((f"ALTER SYSTEM SET {setting} = off", "off"), (f"ALTER SYSTEM RESET {setting}", "on")):
        with server.connect() as connection:
            connection.execute(statement.encode())
            connection.execute("SELECT pg_reload_conf()")
        deadline = time.monotonic() + 30
        while show(server, setting) != value:
            assert time.monotonic() < deadline
        if value == "off":
            yield


def show(server: PostgresServer, setting: str) -> str:
    with server.connect() as connection:
        (value,) = connection.execute(f"SHOW {setting}".encode()).fetchone() or ("",)
    return value


@contextmanager
def weak_file(pragma: str) -> Iterator[None]:
    """Every connection to a SQLite file runs with ``pragma``, whatever it was told before."""

    def weaken(connection: Connection) -> None:
        connection.exec_driver_sql(f"PRAGMA {pragma}")

    event.listen(Engine, "engine_connect", weaken)
    try:
        yield
    finally:
        event.remove(Engine, "engine_connect", weaken)


@pytest.mark.parametrize("setting", ["fsync", "full_page_writes"])
async def test_a_server_that_a_power_cut_can_break_is_refused(
    postgres: PostgresServer, postgres_url: str, setting: str, tmp_path: Path
) -> None:
    with weak_server(postgres, setting):
        with pytest.raises(WeakDurability, match=f"{setting}=off; set it to on"):
            async with open_database(postgres_url, blob_dir=tmp_path):
                pass
        async with open_database(postgres_url, blob_dir=tmp_path, allow_weak_durability=True):
            pass


async def test_a_server_that_acknowledges_before_it_writes_is_refused_unless_that_is_wanted(
    forgetful: str, tmp_path: Path
) -> None:
    with pytest.raises(WeakDurability, match="synchronous_commit=off; set it to on"):
        async with open_database(forgetful, blob_dir=tmp_path):
            pass
    async with open_database(forgetful, blob_dir=tmp_path, allow_weak_durability=True) as database:
        assert await database.apply(lambda unit: unit.keys.ensure_project("here"))


@pytest.mark.parametrize("pragma", ["synchronous = NORMAL", "synchronous = OFF", "journal_mode = DELETE"])
async def test_a_file_that_may_forget_is_refused_unless_that_is_wanted(
    sqlite_url: str, pragma: str, tmp_path: Path
) -> None:
    with weak_file(pragma):
        with pytest.raises(WeakDurability, match="must run with wal and FULL"):
            async with open_database(sqlite_url, blob_dir=tmp_path):
                pass
        async with open_database(sqlite_url, blob_dir=tmp_path, allow_weak_durability=True):
            pass


async def test_every_connection_to_a_file_is_durable(sqlite_url: str, tmp_path: Path) -> None:
    async with open_database(sqlite_url, blob_dir=tmp_path) as database:
        for ask in (database.look, database.change):
            mode, synchronous = await ask(
                lambda connection: tuple(
                    connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
                    for name in ("journal_mode", "synchronous")
                )
            )
            assert (mode, synchronous) == ("wal", 2)


async def test_a_file_that_is_no_database_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "loopline.db").write_bytes(b"no database " * 400)
    with pytest.raises(UnfitDatabase, match="file is not a database"):
        async with open_database(f"sqlite:///{tmp_path}/loopline.db", blob_dir=tmp_path):
            pass


async def test_a_file_that_cannot_be_opened_is_away_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="cannot be opened: unable to open database file"):
        async with open_database(f"sqlite:///{tmp_path}/missing/loopline.db", blob_dir=tmp_path):
            pass


async def test_doctor_says_what_a_weak_database_may_lose_also_where_that_is_wanted(
    forgetful: str, tmp_path: Path
) -> None:
    settings = Settings(data_dir=tmp_path, database_url=forgetful)
    strict = await check_database(settings)
    lenient = await check_database(settings.model_copy(update={"allow_weak_durability": True}))
    assert [strict.verdict, lenient.verdict] == [Verdict.WRONG, Verdict.WARNING]
    assert strict.advice.startswith("PostgreSQL runs with synchronous_commit=off; set it to on")


def environment(data_dir: Path, **env: str) -> dict[str, str]:
    """Return what a process runs with that serves ``data_dir``, which gets a catalogue."""
    (data_dir / "run").mkdir(exist_ok=True)
    (data_dir / "run" / "catalog.toml").write_text(CATALOG)
    return {**os.environ, "LOOPLINE_DATA_DIR": str(data_dir), "LOOPLINE_PORT": "0", **env}


def started(program: str, data_dir: Path, **env: str) -> tuple[int, list[str]]:
    """Run ``program`` to its end; return its exit status and the lines that it wrote."""
    done = subprocess.run(
        [sys.executable, *PROGRAMS[program]],
        env=environment(data_dir, **env),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == ""
    return done.returncode, done.stderr.splitlines()


def refusal(program: str, data_dir: Path, **env: str) -> str:
    """Return why ``program`` did not start: its last line, with status 2 and no traceback before it."""
    status, lines = started(program, data_dir, **env)
    assert status == 2, lines
    assert not [line for line in lines if "Traceback" in line]
    last = json.loads(lines[-1])
    assert last["event"] == f"{program}_not_started"
    return last["reason"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_process_says_in_a_line_why_it_does_not_use_a_weak_database(
    program: str, forgetful: str, tmp_path: Path
) -> None:
    reason = refusal(program, tmp_path, LOOPLINE_DATABASE_URL=forgetful)
    assert reason.startswith("PostgreSQL runs with synchronous_commit=off; set it to on. LOOPLINE_ALLOW_WEAK")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_process_says_in_a_line_which_setting_is_wrong(program: str, tmp_path: Path) -> None:
    reason = refusal(program, tmp_path, LOOPLINE_OBJECT_STORE="secret-bucket", LOOPLINE_TRACES="perhaps")
    assert "LOOPLINE_OBJECT_STORE: String should match" in reason
    assert "LOOPLINE_TRACES: Input should be a valid boolean" in reason
    assert "secret-bucket" not in reason


def test_gateway_and_trainers_that_start_together_on_an_empty_database_migrate_it_once_and_are_ready(
    tmp_path: Path,
) -> None:
    commands = [PROGRAMS["trainer"], PROGRAMS["gateway"], PROGRAMS["trainer"]]
    running = [
        subprocess.Popen(
            [sys.executable, *command], env=environment(tmp_path), stderr=subprocess.PIPE, text=True, process_group=0
        )
        for command in commands
    ]
    lines: list[str] = []
    try:
        for process in running:
            assert process.stderr is not None
            for line in process.stderr:
                lines.append(line)
                if json.loads(line)["event"] in ("ready", "trainer_ready"):
                    break
            else:
                pytest.fail("".join(lines))
        for process in running:
            process.terminate()
        lines += [process.communicate(timeout=60)[1] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert "".join(lines).count("Running upgrade") == int(REVISION)
