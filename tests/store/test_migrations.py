"""The migrations: they build what the code expects, on both databases, once, whoever starts first."""

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
)
from sqlalchemy.pool import NullPool

import migrations
from billing.tables import metadata as ledger
from gateway.store.tables import metadata
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


def test_a_database_is_at_head_after_an_upgrade_and_not_before(empty_url: str) -> None:
    before = migrations.check(empty_url)
    migrations.upgrade(empty_url)
    migrations.upgrade(empty_url)

    assert (before, migrations.check(empty_url)) == (False, True)


def test_checking_creates_nothing(tmp_path: Path) -> None:
    assert migrations.check(f"sqlite:///{tmp_path}/new/loopline.db") is False
    assert list(tmp_path.iterdir()) == []


def test_processes_that_start_together_migrate_once(empty_url: str) -> None:
    script = "import sys, migrations; migrations.upgrade(sys.argv[1])"
    processes = [subprocess.Popen([sys.executable, "-c", script, empty_url], cwd=ROOT) for _ in range(2)]

    assert [process.wait(timeout=60) for process in processes] == [0, 0]
    assert migrations.check(empty_url)


def test_another_kind_of_url_is_refused_without_its_password() -> None:
    with pytest.raises(ValueError, match="mysql") as refused:
        migrations.upgrade("mysql://user:secret@host/name")
    assert "secret" not in str(refused.value)
