"""The audit log on both databases: newest first, per project, and never changed."""

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DatabaseError

from gateway.core.errors import Invalid
from gateway.core.ids import KeyId
from gateway.store import SqlDatabase


async def test_entries_are_read_newest_first_and_per_project(database: SqlDatabase) -> None:
    for number, project in enumerate(("one", "two", "one")):
        async with database.write() as unit:
            project_id = await unit.keys.ensure_project(project)
            await unit.audit.add(
                project_id, actor=KeyId("k"), action="PUT /x", subject=f"n={number}", request_id="req-1"
            )
    async with database.read() as unit:
        names = await unit.keys.projects()
        first = next(id for id, name in names.items() if name == "one")
        page = await unit.audit.page(first, limit=10, after=None)
        every = await unit.audit.page(None, limit=10, after=None)
        rest = await unit.audit.page(None, limit=10, after=every[0].id)

    assert len(every) == 3
    assert {entry.subject for entry in page} == {"n=0", "n=2"}
    assert [entry.id for entry in every] == sorted((entry.id for entry in every), reverse=True)
    assert rest == every[1:]


@pytest.mark.parametrize("change", ["UPDATE audit SET subject = 'x'", "DELETE FROM audit"])
async def test_nobody_rewrites_the_audit_log(database: SqlDatabase, change: str) -> None:
    async with database.write() as unit:
        await unit.audit.add(await unit.keys.ensure_project("one"), actor=None, action="keys create", subject="key=k")
    with pytest.raises(DatabaseError, match="append-only"):
        await database.change(lambda connection: connection.execute(text(change)))


async def test_a_place_that_no_database_can_hold_is_refused(database: SqlDatabase) -> None:
    async with database.read() as unit:
        with pytest.raises(Invalid, match="after must not contain NUL"):
            await unit.audit.page(None, limit=10, after="\0")
