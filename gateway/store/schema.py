"""A database is used only at the schema that this code knows. An empty one may be given it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from sqlalchemy import Connection, inspect, text

from gateway.store.tables import REVISION
from gateway.store.unfit import UnfitDatabase

T = TypeVar("T")


class OtherSchema(UnfitDatabase):
    """The database's tables are not those of this code; the message says what to do."""


class Looks(Protocol):
    def look(self, work: Callable[[Connection], T]) -> Awaitable[T]: ...


async def require_schema(database: Looks, url: str, *, create: bool) -> None:
    """Return when the database of ``url`` is at ``REVISION``. Whoever is migrating it is waited for; with ``create`` an
    empty one is migrated, by one of all that ask at once.

    Raises:
        OtherSchema: it is older or newer, or empty.
    """
    if await database.look(_revision) == REVISION:
        return
    await asyncio.to_thread(_settle, url, create)
    await database.look(check_schema)


def check_schema(connection: Connection) -> None:
    """Raises OtherSchema: the database is older or newer than this code, or empty."""
    found = _revision(connection)
    if found is not None and found > REVISION:
        raise OtherSchema(
            f"the database is of a newer version of Loopline: install that (schema {found}, this one knows {REVISION})"
        )
    if found != REVISION:
        raise OtherSchema(
            f"the database has {f'the older schema {found}' if found else 'no tables of Loopline'}: "
            f"run `loopline db upgrade`, which brings it to {REVISION} (`loopline up` does it, too)"
        )


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()


def _settle(url: str, create: bool) -> None:
    import migrations  # seldom needed: a fifth of a second of a trainer's start

    migrations.settle(url, create=create)
