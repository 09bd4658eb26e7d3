"""KeyStore on SQL: projects and API keys. Secrets are derived from the master key and are not here."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from sqlalchemy import RowMapping, and_, bindparam, select, update

from gateway.core.errors import Conflict, Invalid
from gateway.core.ids import KeyId, ProjectId, new_project_id
from gateway.core.principals import Key, Scope
from gateway.core.usage import HOUSE, HOUSE_NAME
from gateway.store.tables import keys, projects
from gateway.store.text import missing, require_storable
from gateway.store.text import storable as _storable
from gateway.store.transaction import Transaction

_ONE = select(keys).where(keys.c.id == bindparam("key"))  # asked with nearly every request, so built once


class SqlKeyStore:
    """KeyStore."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    async def ensure_project(self, name: str) -> ProjectId:
        require_storable(name, "project")
        if name == HOUSE_NAME:
            raise Invalid(f"{HOUSE_NAME} is the gateway's own project", field="project")
        row = {"id": new_project_id(), "name": name, "created_at": self._transaction.clock.now()}
        await self._transaction.insert_new(projects, row)
        rows = await self._transaction.rows(select(projects.c.id).where(projects.c.name == name))
        return ProjectId(rows[0]["id"])

    async def create_project(self, name: str) -> ProjectId:
        known = await self.projects()
        project_id = await self.ensure_project(name)
        if project_id in known:
            raise Conflict(f"there is a project {name!r} already", code="project_exists", field="name")
        return project_id

    async def projects(self) -> Mapping[ProjectId, str]:
        rows = await self._transaction.rows(select(projects).order_by(projects.c.created_at, projects.c.id))
        return {ProjectId(row["id"]): row["name"] for row in rows}

    async def ensure_house(self) -> None:
        row = {"id": HOUSE, "name": HOUSE_NAME, "created_at": self._transaction.clock.now()}
        await self._transaction.insert_new(projects, row)

    async def add(self, key: Key) -> None:
        require_storable(key.name, "name")
        await self._transaction.write(
            keys.insert().values(
                id=key.id,
                project_id=key.project_id,
                name=key.name,
                scopes=" ".join(sorted(key.scopes)),
                created_at=key.created_at,
                expires_at=key.expires_at,
                revoked_at=key.revoked_at,
            )
        )
        self._transaction.announce()

    async def get(self, key_id: KeyId) -> Key | None:
        if not _storable(key_id):
            return None
        row = await self._transaction.first(_ONE, {"key": key_id})
        return None if row is None else _key_of(row)

    async def all(self) -> Sequence[Key]:
        return [
            _key_of(row) for row in await self._transaction.rows(select(keys).order_by(keys.c.created_at, keys.c.id))
        ]

    async def expire(self, key_id: KeyId, at: datetime) -> Key:
        known = await self._known(key_id)
        ends = at if known.expires_at is None else min(at, known.expires_at)
        await self._transaction.write(update(keys).where(keys.c.id == key_id).values(expires_at=ends))
        return replace(known, expires_at=ends)

    async def _known(self, key_id: KeyId) -> Key:
        known = await self.get(key_id)
        if known is None:
            raise missing("key", key_id)
        return known

    async def revoke(self, key_id: KeyId, at: datetime) -> Key:
        await self._known(key_id)
        changed = await self._transaction.write(
            update(keys).where(and_(keys.c.id == key_id, keys.c.revoked_at.is_(None))).values(revoked_at=at)
        )
        if changed:
            self._transaction.announce()
        rows = await self._transaction.rows(select(keys).where(keys.c.id == key_id))
        return _key_of(rows[0])


def _key_of(row: RowMapping) -> Key:
    return Key(
        id=KeyId(row["id"]),
        project_id=ProjectId(row["project_id"]),
        name=row["name"],
        scopes=frozenset(Scope(word) for word in row["scopes"].split()),
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
    )
