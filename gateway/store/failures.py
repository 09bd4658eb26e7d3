"""What a driver's error means: the database is away, its disk is full, or the statement is wrong."""

import sqlite3

import psycopg.errors
from sqlalchemy.exc import InternalError, OperationalError

_SQLITE_AWAY = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_INTERRUPT,
    }
)


def is_away(error: OperationalError) -> bool:
    """Say whether the same statement may work later. SQLite calls a wrong statement an operational error too."""
    return not isinstance(error.orig, sqlite3.OperationalError) or _primary(error.orig) in _SQLITE_AWAY


def was_abandoned(error: InternalError) -> bool:
    """Say whether the server ended a transaction because its process had said nothing for too long."""
    return isinstance(error.orig, psycopg.errors.IdleInTransactionSessionTimeout)


def is_busy(error: OperationalError) -> bool:
    """Say whether another connection holds the lock."""
    busy = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    return isinstance(error.orig, sqlite3.OperationalError) and _primary(error.orig) in busy


def is_full(error: BaseException) -> bool:
    """Say whether the database's disk has no room left."""
    if not isinstance(error, OperationalError):
        return False
    if isinstance(error.orig, sqlite3.OperationalError):
        return _primary(error.orig) == sqlite3.SQLITE_FULL
    return isinstance(error.orig, psycopg.errors.DiskFull)


def is_unsynced(error: BaseException) -> bool:
    """Say whether SQLite's log could not be synced."""
    return (
        isinstance(error, OperationalError)
        and isinstance(error.orig, sqlite3.OperationalError)
        and error.orig.sqlite_errorcode == sqlite3.SQLITE_IOERR_FSYNC
    )


def _primary(error: sqlite3.OperationalError) -> int:
    return error.sqlite_errorcode & 0xFF
