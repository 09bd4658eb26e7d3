"""A real PostgreSQL for tests: one server per test run in a temporary directory, one cloned database per test.

Use it by importing the fixture ``postgres`` in a ``conftest.py``. Without a server binary the tests that need it are
skipped, in CI they fail.
"""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

import migrations

TEMPLATE = "loopline_template"
_START_S = 30.0


def find_binaries() -> Path | None:
    """Return the directory of the newest server's binaries, None when there is no server."""
    found = shutil.which("initdb")
    candidates = [Path(found).resolve().parent] if found else []
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: -float(path.parent.name))
    return next((path for path in candidates if (path / "initdb").exists() and (path / "postgres").exists()), None)


class PostgresServer:
    """A running server that only listens on a socket in its own directory."""

    def __init__(self, directory: Path, process: "subprocess.Popen[bytes]") -> None:
        self.directory = directory
        self.process = process
        self._databases = 0

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://postgres@/{database}?host={self.directory}"

    def connect(self, database: str = "postgres") -> "psycopg.Connection":
        return psycopg.connect(host=str(self.directory), user="postgres", dbname=database, autocommit=True)

    def create(self, *, template: str = "template0") -> str:
        """Create a database and return its name."""
        self._databases += 1
        name = f"test_{self._databases}"
        with self.connect() as connection:
            connection.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(template))
            )
        return name

    def drop(self, name: str) -> None:
        with self.connect() as connection:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def start_postgres(directory: Path, binaries: Path, *options: str) -> PostgresServer:
    """Initialise a cluster under ``directory`` unless there is one, start it and wait until it answers.

    PostgreSQL refuses to run as root; then it runs as the user ``postgres``.
    """
    user = "postgres" if os.geteuid() == 0 else None
    if user is not None:
        account = pwd.getpwnam(user)
        os.chown(directory, account.pw_uid, account.pw_gid)
    group, groups = (None, None) if user is None else ("postgres", [])
    data = directory / "data"
    if not data.exists():
        subprocess.run(
            [
                str(binaries / "initdb"),
                *("--pgdata", str(data), "--username", "postgres", "--auth", "trust"),
                *("--encoding", "UTF8", "--locale", "C", "--no-sync"),
            ],
            check=True,
            capture_output=True,
            cwd=directory,
            user=user,
            group=group,
            extra_groups=groups,
        )
    with (directory / "log").open("ab") as log:
        process = subprocess.Popen(
            [
                str(binaries / "postgres"),
                *("-D", str(data), "-k", str(directory), "-c", "listen_addresses=", "-c", "shared_buffers=32MB"),
                *options,
            ],
            stdout=log,
            stderr=log,
            cwd=directory,
            user=user,
            group=group,
            extra_groups=groups,
            process_group=0,
        )
    server = PostgresServer(directory, process)
    deadline = time.monotonic() + _START_S
    while True:
        try:
            server.connect().close()
        except psycopg.OperationalError:
            if process.poll() is not None or time.monotonic() > deadline:
                stop_postgres(server)
                raise RuntimeError((directory / "log").read_text()) from None
            time.sleep(0.02)
        else:
            return server


def stop_postgres(server: PostgresServer) -> None:
    """End the server at once, whoever is connected; its data is thrown away anyway."""
    server.process.send_signal(signal.SIGQUIT)
    try:
        server.process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A server with a migrated template database."""
    binaries = find_binaries()
    if binaries is None:
        reason = "no PostgreSQL server: neither initdb on PATH nor /usr/lib/postgresql/*/bin (Debian: postgresql)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    directory = Path(tempfile.mkdtemp(prefix="loopline-pg-"))
    server = None
    try:
        server = start_postgres(directory, binaries)
        with server.connect() as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(TEMPLATE)))
        migrations.upgrade(server.url(TEMPLATE))
        yield server
    finally:
        if server is not None:
            stop_postgres(server)
        shutil.rmtree(directory, ignore_errors=True)
