"""Registry on SQL: what is done to versions after they were saved. Every change leaves a line of history."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, and_, delete, or_, select, update

from gateway.core.clients import LIVES, Seat
from gateway.core.errors import Conflict, NotFound
from gateway.core.ids import ClientId, KeyId, ProjectId, VersionId, new_event_id
from gateway.core.operations import Status
from gateway.core.versions import Event, Labels, Version, VersionEvent, VersionState
from gateway.store.client_tables import clients, samplers
from gateway.store.loads import is_being_loaded
from gateway.store.sessions import lock_session
from gateway.store.tables import LIVE, operations
from gateway.store.text import missing, storable
from gateway.store.transaction import Transaction
from gateway.store.version_rows import label_columns, read_version, standing, version_of
from gateway.store.version_tables import aliases, version_events, versions


class SqlRegistry:
    """Registry."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    async def set_alias(
        self, project_id: ProjectId, version_id: VersionId, alias: str, *, by: KeyId, at: datetime
    ) -> Version:
        version = await self._locked(project_id, version_id)
        version.require_present(at)
        if version.state is VersionState.REJECTED:
            raise Conflict(f"{version.address} was rejected", code="version_rejected", field="version")
        before = await self._aliased(project_id, version.group, alias)
        if before is not None and before.id == version.id:
            return version
        row = {"project_id": project_id, "group_name": version.group, "alias": alias, "version_id": version.id}
        key = [aliases.c.project_id, aliases.c.group_name, aliases.c.alias]
        await self._transaction.write(
            self._transaction.insert(aliases)
            .values(row)
            .on_conflict_do_update(index_elements=key, set_={"version_id": version.id})
        )
        previous = None if before is None else before.number
        await self._note(version.id, Event.ALIASED, at, by, alias=alias, previous=previous)
        return version

    async def drop_alias(self, project_id: ProjectId, group: str, alias: str, *, by: KeyId, at: datetime) -> None:
        version = await self._aliased(project_id, group, alias)
        if version is None:
            raise missing("alias", f"{group}@{alias}")
        await self._transaction.write(delete(aliases).where(_is_alias(project_id, group, alias)))
        await self._note(version.id, Event.UNALIASED, at, by, alias=alias, previous=version.number)

    async def aliases_of(self, version_ids: Sequence[VersionId]) -> dict[VersionId, list[str]]:
        rows = await self._transaction.rows(
            select(aliases.c.version_id, aliases.c.alias)
            .where(aliases.c.version_id.in_(version_ids))
            .order_by(aliases.c.alias)
        )
        found: dict[VersionId, list[str]] = {}
        for row in rows:
            found.setdefault(VersionId(row["version_id"]), []).append(row["alias"])
        return found

    async def edit(
        self, project_id: ProjectId, version_id: VersionId, labels: Labels, *, by: KeyId, at: datetime
    ) -> Version:
        version = await self._locked(project_id, version_id)
        version.require_present(at)
        kept = replace(labels, name=version.labels.name)
        if kept != version.labels:
            columns = label_columns(kept, at)
            if kept.ttl_s == version.labels.ttl_s:
                columns["expires_at"] = version.expires_at
            await self._change(version.id, **columns)
            await self._note(version.id, Event.EDITED, at, by)
        return await read_version(self._transaction, project_id, version_id)

    async def delete(
        self, project_id: ProjectId, version_id: VersionId, *, force: bool, by: KeyId, at: datetime
    ) -> Version:
        version = await self._locked(project_id, version_id)
        if version.deleted_at is None:
            await self._guard(version, force=force, at=at)
            await self._change(version.id, deleted_at=at)
            await self._note(version.id, Event.DELETED, at, by)
        return await read_version(self._transaction, project_id, version_id)

    async def replace(self, project_id: ProjectId, version_id: VersionId, *, by: KeyId, at: datetime) -> None:
        await self.delete(project_id, version_id, force=True, by=by, at=at)
        await self._change(version_id, name=None)

    async def undelete(
        self, project_id: ProjectId, version_id: VersionId, *, window: timedelta, by: KeyId, at: datetime
    ) -> Version:
        version = await self._locked(project_id, version_id)
        if version.deleted_at is None:
            return version
        if version.purged_at is not None or version.deleted_at + window <= at:
            raise Conflict(
                f"{version.address} was deleted too long ago to be brought back", code="undelete_window_over"
            )
        never = version.expires_at is not None and version.expires_at <= at
        await self._change(version.id, deleted_at=None, **({"ttl_s": None, "expires_at": None} if never else {}))
        await self._note(version.id, Event.UNDELETED, at, by)
        return await read_version(self._transaction, project_id, version_id)

    async def history(
        self, project_id: ProjectId, group: str, *, limit: int, after: str | None = None
    ) -> Sequence[VersionEvent]:
        if not storable(group):
            return []
        at, id = version_events.c.at, version_events.c.id
        query = (
            select(version_events, versions.c.number)
            .join(versions, versions.c.id == version_events.c.version_id)
            .where(and_(versions.c.project_id == project_id, versions.c.group_name == group))
        )
        if after is not None:
            last = await self._transaction.rows(query.where(id == after)) if storable(after) else ()
            if not last:
                raise NotFound("no such event in this group's history", field="after")
            query = query.where(or_(at < last[0]["at"], and_(at == last[0]["at"], id < after)))
        rows = await self._transaction.rows(query.order_by(at.desc(), id.desc()).limit(limit))
        return [
            VersionEvent(
                id=row["id"],
                version_id=VersionId(row["version_id"]),
                number=row["number"],
                event=Event(row["event"]),
                alias=row["alias"],
                previous=row["previous"],
                key_id=None if row["key_id"] is None else KeyId(row["key_id"]),
                at=row["at"],
            )
            for row in rows
        ]

    async def _locked(self, project_id: ProjectId, version_id: VersionId) -> Version:
        version = await read_version(self._transaction, project_id, version_id)
        await lock_session(self._transaction, version.session_id)
        return await read_version(self._transaction, project_id, version_id)

    async def _aliased(self, project_id: ProjectId, group: str, alias: str) -> Version | None:
        if not (storable(group) and storable(alias)):
            return None
        row = await self._transaction.first(
            select(versions)
            .join(aliases, aliases.c.version_id == versions.c.id)
            .where(_is_alias(project_id, group, alias))
        )
        return None if row is None else version_of(row)

    async def _guard(self, version: Version, *, force: bool, at: datetime) -> None:
        """Raise when deleting ``version`` would take from under somebody what he relies on."""
        named = (await self.aliases_of([version.id])).get(version.id)
        if named:
            raise Conflict(
                f"{version.address} has the alias {named[0]}; take it away first", code="version_aliased", field="alias"
            )
        if await self._being_published(version) or await is_being_loaded(self._transaction, version.id):
            raise Conflict(f"an operation works with {version.address} just now", code="version_in_use")
        if force or version.state is VersionState.REJECTED:
            return
        session = await lock_session(self._transaction, version.session_id)
        live = session["status"] in LIVE
        if live and session["latest_version_id"] == version.id:
            raise Conflict(
                f"the live session {version.session_id} answers with {version.address}; force deletes it all the same",
                code="version_in_use",
            )
        if (pinned := await self._pinned_by(version, at)) is not None:
            raise Conflict(
                f"the sampler {pinned.sampler_address} answers with {version.address}; force deletes it all the same",
                code="version_in_use",
            )
        if not live and not await self._has_sibling(version):
            raise Conflict(
                f"{version.address} is all that is left of session {version.session_id}; force deletes it all the same",
                code="only_copy",
            )

    async def _pinned_by(self, version: Version, at: datetime) -> Seat | None:
        """Return the seat of a sampler that stays with ``version`` and belongs to a program that lives."""
        row = await self._transaction.first(
            select(samplers.c.client_id, samplers.c.client_number)
            .join(clients, clients.c.id == samplers.c.client_id)
            .where(
                and_(
                    or_(samplers.c.version_id == version.id, samplers.c.operation_id == version.operation_id),
                    clients.c.project_id == version.project_id,
                    clients.c.finished_at.is_(None),
                    clients.c.seen_at > at - LIVES,
                )
            )
            .limit(1)
        )
        return None if row is None else Seat(client_id=ClientId(row["client_id"]), number=row["client_number"])

    async def _being_published(self, version: Version) -> bool:
        return (
            version.state is VersionState.STAGED
            and await self._transaction.first(
                select(operations.c.id).where(
                    and_(operations.c.id == version.operation_id, operations.c.status == Status.RUNNING)
                )
            )
            is not None
        )

    async def _has_sibling(self, version: Version) -> bool:
        return (
            await self._transaction.first(
                select(versions.c.id)
                .where(and_(versions.c.session_id == version.session_id, versions.c.id != version.id, standing()))
                .limit(1)
            )
            is not None
        )

    async def _change(self, version_id: VersionId, **columns: object) -> None:
        await self._transaction.write(update(versions).where(versions.c.id == version_id).values(**columns))

    async def _note(
        self,
        version_id: VersionId,
        event: Event,
        at: datetime,
        by: KeyId | None,
        *,
        alias: str | None = None,
        previous: int | None = None,
    ) -> None:
        await note(self._transaction, version_id, event, at, by, alias=alias, previous=previous)


async def note(
    transaction: Transaction,
    version_id: VersionId,
    event: Event,
    at: datetime,
    by: KeyId | None = None,
    *,
    alias: str | None = None,
    previous: int | None = None,
) -> None:
    """Add a line of history."""
    await transaction.write(
        version_events.insert().values(
            id=new_event_id(),
            version_id=version_id,
            event=event.value,
            alias=alias,
            previous=previous,
            key_id=by,
            at=at,
        )
    )


def _is_alias(project_id: ProjectId, group: str, alias: str) -> ColumnElement[bool]:
    return and_(aliases.c.project_id == project_id, aliases.c.group_name == group, aliases.c.alias == alias)
