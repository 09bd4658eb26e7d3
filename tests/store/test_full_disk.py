"""A database whose disk is full says so, in both dialects of SQL, and works on once there is room."""

import pytest
from sqlalchemy import Connection

from gateway.core.errors import Unavailable
from gateway.store import SqlDatabase

_POSTGRES_FULL = "DO $$ BEGIN RAISE 'no room' USING ERRCODE = 'disk_full'; END $$"


async def test_a_database_without_room_is_full_and_not_away_and_needs_no_restart(database: SqlDatabase) -> None:
    def fill(connection: Connection) -> None:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql(_POSTGRES_FULL)
        connection.exec_driver_sql("PRAGMA max_page_count = 1")  # as few as there are
        connection.exec_driver_sql("CREATE TABLE filler AS SELECT zeroblob(1000000)")

    def free(connection: Connection) -> None:
        if connection.dialect.name == "sqlite":
            connection.exec_driver_sql("PRAGMA max_page_count = 1000000")

    with pytest.raises(Unavailable) as full:
        await database.change(fill)
    assert full.value.code == "disk_full"
    await database.change(free)
    async with database.write() as unit:
        assert await unit.keys.ensure_project("later")
