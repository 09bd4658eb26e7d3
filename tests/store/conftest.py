"""One suite, two databases: every test that takes ``database`` runs on a SQLite file and on a real PostgreSQL."""

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

import migrations
from billing.tables import metadata as ledger
from gateway.store import SqlDatabase, open_database
from gateway.store.tables import metadata
from tests.postgres import TEMPLATE, PostgresServer, postgres
from tests.store.bench import Bench, HandClock, open_bench

__all__ = ["postgres"]


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "loopline.db"
    migrations.upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture
def sqlite_url(sqlite_template: Path, tmp_path: Path) -> str:
    """A fresh, migrated SQLite file."""
    path = tmp_path / "loopline.db"
    shutil.copy(sqlite_template, path)
    return f"sqlite:///{path}"


@pytest.fixture(scope="session")
def shared_postgres_url(postgres: PostgresServer) -> str:
    return postgres.url(postgres.create(template=TEMPLATE))


@pytest.fixture
def postgres_url(shared_postgres_url: str) -> Iterator[str]:
    """A migrated PostgreSQL database without rows: one for all tests, emptied after each (a clone each is slow)."""
    yield shared_postgres_url
    engine = create_engine(shared_postgres_url, poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(text("SET session_replication_role = replica"))  # the triggers refuse to forget the ledger
        for table in (*metadata.sorted_tables, *ledger.sorted_tables):
            connection.execute(table.delete())


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url")


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
async def database(url: str, tmp_path: Path, clock: HandClock) -> AsyncIterator[SqlDatabase]:
    async with open_database(url, blob_dir=tmp_path / "blobs", clock=clock) as opened:
        yield opened


@pytest.fixture
async def bench(database: SqlDatabase, clock: HandClock) -> Bench:
    """A project with a key, and short ways to what the tests do."""
    return await open_bench(database, clock)
