"""A connection of billing's own, for what runs beside the gateway: the command line and the reconciliation."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.pool import NullPool

_LEDGER_LOCK = 0x6C656467  # "ledg": one number that only whoever posts takes


@contextmanager
def reading(url: str) -> Iterator[Connection]:
    """Open one consistent snapshot."""
    parsed = _sync(url)
    if parsed.get_backend_name() == "sqlite":
        engine = _sqlite(parsed, "BEGIN")
    else:
        engine = create_engine(parsed, poolclass=NullPool, isolation_level="REPEATABLE READ")
    with engine.connect() as connection:
        yield connection


@contextmanager
def writing(url: str) -> Iterator[Connection]:
    """Open a transaction; leaving normally commits it durably."""
    parsed = _sync(url)
    engine = (
        _sqlite(parsed, "BEGIN IMMEDIATE")
        if parsed.get_backend_name() == "sqlite"
        else create_engine(parsed, poolclass=NullPool)
    )
    with engine.begin() as connection:
        yield connection


def is_postgres(connection: Connection) -> bool:
    return connection.dialect.name == "postgresql"


def lock_ledger(connection: Connection) -> None:
    """Be the only one who posts until the transaction ends. On SQLite a writer is alone already."""
    if is_postgres(connection):
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LEDGER_LOCK})")


def _sync(url: str) -> URL:
    parsed = make_url(url)
    return parsed.set(drivername="sqlite") if parsed.get_backend_name() == "sqlite" else parsed


def _sqlite(url: URL, begin: str) -> Engine:
    engine = create_engine(url, poolclass=NullPool, connect_args={"isolation_level": None, "timeout": 30})

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: Any) -> None:  # pyright: ignore[reportUnusedFunction]
        cursor = connection.cursor()
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def start(connection: Connection) -> None:  # pyright: ignore[reportUnusedFunction]
        connection.exec_driver_sql(begin)

    return engine
