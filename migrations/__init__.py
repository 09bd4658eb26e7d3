"""The database schema: one chain of Alembic migrations for SQLite and PostgreSQL.

A database is used only at the newest revision. ``upgrade`` and ``settle`` may run in several processes at once: one
works, the others wait. Each migration commits as a whole or not at all; an empty database gets all of them or none.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import URL, Connection, create_engine, event, inspect, make_url, text
from sqlalchemy.pool import NullPool

_ADVISORY_LOCK = 0x6C6F6F70  # "loop": one number that only migrations take
_DRIVERS = ("sqlite", "postgresql+psycopg")


def upgrade(url: str) -> None:
    """Bring the database of ``url`` to the newest revision; a SQLite file is created with its directory.

    Raises:
        ValueError: a URL of another kind.
    """
    with _alone(_checked_url(url)) as connection:
        _upgrade(connection, empty=_is_empty(connection))


def settle(url: str, *, create: bool) -> None:
    """Wait for whoever migrates the database of ``url``; with ``create`` migrate it if it is empty.

    Raises:
        ValueError: a URL of another kind.
    """
    with _alone(_checked_url(url)) as connection:
        if create and _is_empty(connection):
            _upgrade(connection, empty=True)


@contextmanager
def _alone(url: URL) -> Iterator[Connection]:
    """Connect while nobody else migrates."""
    if url.get_backend_name() == "sqlite":
        path = Path(str(url.database)).absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        with _file_lock(path.with_name(f"{path.name}.migrate-lock")), _connect(url) as connection:
            yield connection
    else:
        with _connect(url) as lock, _connect(url) as connection:
            lock.execute(text("SELECT pg_advisory_lock(:key)"), {"key": _ADVISORY_LOCK})
            lock.commit()
            yield connection  # closing ``lock`` frees it


def _is_empty(connection: Connection) -> bool:
    with connection.begin():
        return not inspect(connection).get_table_names()


def _upgrade(connection: Connection, *, empty: bool) -> None:
    config = _config()
    config.attributes.update(connection=connection, at_once=empty)
    command.upgrade(config, "head")


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _checked_url(url: str) -> URL:
    parsed = make_url(url)
    if parsed.drivername not in _DRIVERS:
        raise ValueError(f"database URL must be sqlite:///... or postgresql+psycopg://..., not {parsed.drivername}")
    return parsed


@contextmanager
def _connect(url: URL) -> Iterator[Connection]:
    if url.get_backend_name() == "sqlite":
        engine = create_engine(url, poolclass=NullPool, connect_args={"isolation_level": None, "timeout": 30})

        @event.listens_for(engine, "begin")
        def begin(connection: Connection) -> None:  # pyright: ignore[reportUnusedFunction]
            connection.exec_driver_sql("BEGIN IMMEDIATE")  # the driver would leave DDL outside the transaction

    else:
        engine = create_engine(url, poolclass=NullPool)
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


@contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


__all__ = ["settle", "upgrade"]
