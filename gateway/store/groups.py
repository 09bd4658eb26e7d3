"""Transactions of SQLite's one writer: how they begin, what goes through them in one go, how they are committed.

Blocks: run in the writer's thread, or, for what is small and needs no fsync, where it is asked for.
"""

import sqlite3
from collections.abc import Callable, Sequence
from typing import cast

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError

from gateway.store.failures import is_busy
from gateway.store.trips import InlineTransaction
from gateway.store.units import Trip

_LASTING = ("PRAGMA synchronous = FULL", "PRAGMA wal_autocheckpoint = 1000", "BEGIN IMMEDIATE")
# Nothing is synced in WAL mode but the head of a log that begins anew, neither at the commit nor because the log is to
# be copied: a lasting one does that.
_FLEETING = ("PRAGMA synchronous = NORMAL", "PRAGMA wal_autocheckpoint = 0", "BEGIN IMMEDIATE")


class LockedByOther(Exception):
    """Another process has the write lock; nothing was begun."""

    def __init__(self, error: OperationalError) -> None:
        super().__init__(str(error))
        self.error = error


def travel(
    connection: Connection,
    trips: Sequence[Trip],
    open_inline: Callable[[Connection], InlineTransaction],
    *,
    lasting: bool,
) -> int | None:
    """Run the units, each under a savepoint unless it is alone, and commit.

    Returns the change counter's new value, if one announced.
    """
    (begin_lasting if lasting else begin_fleeting)(connection)
    kept, announced = 0, False
    for trip in trips:
        transaction = open_inline(connection)
        if trip.run_alone(transaction) if len(trips) == 1 else trip.run(connection, transaction):
            kept += 1
            announced = announced or transaction.announced
    if not kept:
        return None
    if not _driver(connection).in_transaction:
        raise SQLAlchemyError("SQLite rolled the transaction back by itself")  # disk full, and the work went on
    return commit_announced(connection) if announced else commit(connection)


def begin_lasting(connection: Connection) -> None:
    _begin(connection, _LASTING)


def begin_fleeting(connection: Connection) -> None:
    _begin(connection, _FLEETING)


def _begin(connection: Connection, statements: Sequence[str]) -> None:
    driver = _driver(connection)  # with every call twice: SQLAlchemy would take longer than SQLite
    for statement in statements:
        try:
            driver.execute(statement)
        except sqlite3.Error as error:
            driver.rollback()
            known = DBAPIError.instance(statement, None, error, sqlite3.Error)
            if isinstance(known, OperationalError) and is_busy(known):
                raise LockedByOther(known) from None
            raise known from error


def _driver(connection: Connection) -> sqlite3.Connection:
    return cast("sqlite3.Connection", connection.connection.driver_connection)


def restarted(connection: Connection) -> bool:
    """Sync everything into the database and begin a new log; False when somebody still writes or reads the old one."""
    busy, _, _ = connection.exec_driver_sql("PRAGMA wal_checkpoint(RESTART)").one()
    connection.rollback()
    return not busy


def commit(connection: Connection) -> None:
    connection.commit()


def commit_announced(connection: Connection) -> int:
    """Advance the change counter (see wakeups.py) and commit; return its new value."""
    change = (int(connection.exec_driver_sql("PRAGMA user_version").scalar_one()) + 1) % 2**31
    connection.exec_driver_sql(f"PRAGMA user_version = {change}")
    connection.commit()
    return change
