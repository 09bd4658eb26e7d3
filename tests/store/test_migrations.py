"""The migrations: they build what the code expects, on both databases, once, whoever starts first."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import (
    CheckConstraint,
    Connection,
    ForeignKeyConstraint,
    Inspector,
    UniqueConstraint,
    create_engine,
    inspect,
    make_url,
    text,
)
from sqlalchemy.pool import NullPool

import migrations
from billing.tables import metadata as ledger
from gateway.store import OtherSchema, open_database
from gateway.store.tables import REVISION, metadata
from tests.postgres import PostgresServer

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database without tables; on SQLite one whose directory does not exist yet."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/new/directory/loopline.db"
    postgres: PostgresServer = request.getfixturevalue("postgres")
    return postgres.url(postgres.create())


def connect(url: str) -> Connection:
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        parsed = parsed.set(drivername="sqlite")
    return create_engine(parsed, poolclass=NullPool).connect()


def described(inspector: Inspector) -> dict[str, Any]:
    """Return everything that can be read back of the schema, in a form that compares."""
    return {
        table: {
            "columns": [
                (column["name"], str(column["type"]), column["nullable"], column["default"], column.get("comment"))
                for column in inspector.get_columns(table)
            ],
            "primary key": inspector.get_pk_constraint(table),
            "foreign keys": sorted(map(str, inspector.get_foreign_keys(table))),
            "unique": sorted(map(str, inspector.get_unique_constraints(table))),
            "checks": sorted(map(str, inspector.get_check_constraints(table))),
            "indexes": sorted(
                str(
                    (
                        index["name"],
                        index["column_names"],
                        bool(index["unique"]),
                        [str(rule) for name, rule in index.get("dialect_options", {}).items() if "where" in name],
                    )
                )
                for index in inspector.get_indexes(table)
            ),
        }
        for table in sorted(inspector.get_table_names())
        if table != "alembic_version"
    }


def test_migrations_build_exactly_the_tables_of_the_code(
    empty_url: str, postgres: PostgresServer, tmp_path: Path
) -> None:
    migrations.upgrade(empty_url)
    other = f"sqlite:///{tmp_path}/created.db" if "sqlite" in empty_url else postgres.url(postgres.create())
    with connect(other) as connection:
        metadata.create_all(connection)
        ledger.create_all(connection)
        connection.commit()
        created = described(inspect(connection))
    with connect(empty_url) as connection:
        migrated = described(inspect(connection))

    assert migrated == created
    tables = {**metadata.tables, **ledger.tables}
    assert set(migrated) == set(tables)
    for what, kind in (
        ("checks", CheckConstraint),
        ("unique", UniqueConstraint),
        ("foreign keys", ForeignKeyConstraint),
    ):
        written = [rule for table in tables.values() for rule in table.constraints if isinstance(rule, kind)]
        assert sum(len(table[what]) for table in migrated.values()) == len(written)
    partial = [index for table in migrated.values() for index in table["indexes"] if not index.endswith(", [])")]
    assert len(partial) == 18


def test_a_database_is_at_the_newest_revision_after_one_upgrade_or_two(empty_url: str) -> None:
    migrations.upgrade(empty_url)
    migrations.upgrade(empty_url)

    with connect(empty_url) as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one() == REVISION


def test_the_code_knows_the_newest_migration() -> None:
    newest = max((ROOT / "migrations" / "versions").glob("*.py")).stem.partition("_")[0]
    assert newest == REVISION


OPENS = """
import asyncio, logging, sys
from pathlib import Path
from gateway.store import open_database

logging.basicConfig(level=logging.INFO)

async def main():
    async with open_database(sys.argv[1], blob_dir=Path(sys.argv[2]), create=True) as database:
        assert await database.apply(lambda unit: unit.keys.ensure_project("one"))

asyncio.run(main())
"""


def test_of_many_processes_that_start_on_an_empty_database_one_migrates_and_all_work(
    empty_url: str, tmp_path: Path
) -> None:
    if (path := make_url(empty_url).database) and "sqlite" in empty_url:
        Path(path).parent.mkdir(parents=True)
    upgrades = ["import logging, sys, migrations; logging.basicConfig(level=20); migrations.upgrade(sys.argv[1])"] * 2
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, empty_url, str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for script in [OPENS, *upgrades, *[OPENS] * 3]
    ]
    said = [process.communicate(timeout=120)[1] for process in processes]

    assert [process.returncode for process in processes] == [0] * 6, said
    assert "".join(said).count("Running upgrade") == int(REVISION)


def stamp(url: str, revision: str) -> None:
    with connect(url) as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})
        connection.commit()


@pytest.mark.parametrize(
    ("revision", "says"),
    [
        ("0001", "older schema 0001: run `loopline db upgrade`"),
        ("9999", "newer version of Loopline: install that (schema 9999"),
    ],
)
async def test_a_database_of_another_schema_is_refused_and_left_as_it_is(
    url: str, revision: str, says: str, tmp_path: Path
) -> None:
    stamp(url, revision)
    try:
        with pytest.raises(OtherSchema, match=re.escape(says)):
            async with open_database(url, blob_dir=tmp_path, create=True):
                pass
        with connect(url) as connection:
            assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one() == revision
    finally:
        stamp(url, REVISION)


async def test_only_what_serves_makes_tables_and_only_in_an_empty_database(empty_url: str, tmp_path: Path) -> None:
    if "sqlite" in empty_url:
        Path(str(make_url(empty_url).database)).parent.mkdir(parents=True)
    with pytest.raises(OtherSchema, match="has no tables of Loopline: run `loopline db upgrade`"):
        async with open_database(empty_url, blob_dir=tmp_path):
            pass
    with connect(empty_url) as connection:
        connection.execute(text("CREATE TABLE somebodys (id INTEGER)"))
        connection.commit()
    with pytest.raises(OtherSchema, match="no tables"):
        async with open_database(empty_url, blob_dir=tmp_path, create=True):
            pass
    with connect(empty_url) as connection:
        assert inspect(connection).get_table_names() == ["somebodys"]


async def test_a_start_waits_for_a_migration_that_is_going_on(empty_url: str, tmp_path: Path) -> None:
    """Whoever upgrades holds the lock throughout; a start that came in between must see its end."""
    migrations.upgrade(empty_url)
    stamp(empty_url, "0001")
    with migrations._alone(migrations._checked_url(empty_url)) as migrating:  # pyright: ignore[reportPrivateUsage]
        opening = open_database(empty_url, blob_dir=tmp_path)
        opened = asyncio.create_task(opening.__aenter__())
        finished, _ = await asyncio.wait({opened}, timeout=0.5)
        assert not finished
        with migrating.begin():
            migrating.execute(text("UPDATE alembic_version SET version_num = :revision"), {"revision": REVISION})
    await opened
    await opening.__aexit__(None, None, None)


def test_another_kind_of_url_is_refused_without_its_password() -> None:
    with pytest.raises(ValueError, match="mysql") as refused:
        migrations.upgrade("mysql://user:secret@host/name")
    assert "secret" not in str(refused.value)
