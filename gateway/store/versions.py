"""VersionStore on SQL: model package groups and versions."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, RowMapping, and_, func, or_, select, update

from gateway.core.errors import Conflict
from gateway.core.ids import OperationId, ProjectId, SessionId, VersionId
from gateway.core.operations import Status
from gateway.core.payloads import OperationKind
from gateway.core.results import Failure, Outcome, SaveResult
from gateway.core.versions import (
    CanaryReport,
    Group,
    NewVersion,
    Version,
    VersionFilter,
    VersionKind,
    VersionState,
    name_taken,
)
from gateway.store.lora import lora_columns
from gateway.store.operation_rows import record_outcome
from gateway.store.sessions import lock_session, settle_stop
from gateway.store.tables import operations, sessions
from gateway.store.text import missing, require_id, require_storable, storable
from gateway.store.transaction import Transaction
from gateway.store.version_rows import label_columns, read_version, standing, version_of
from gateway.store.version_tables import aliases, groups, versions


class SqlVersionStore:
    """VersionStore."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    async def get(self, project_id: ProjectId, version_id: VersionId) -> Version:
        return await read_version(self._transaction, project_id, version_id)

    async def by_address(self, project_id: ProjectId, group: str, number: int) -> Version:
        if not 1 <= number < 2**31:
            raise missing("version", f"{group}@{number}")
        return await self._only(
            project_id, f"{group}@{number}", versions.c.group_name == group, versions.c.number == number
        )

    async def by_alias(self, project_id: ProjectId, group: str, alias: str) -> Version:
        named_so = select(aliases.c.version_id).where(
            and_(aliases.c.project_id == project_id, aliases.c.group_name == group, aliases.c.alias == alias)
        )
        return await self._only(project_id, f"{group}@{alias}", versions.c.id == named_so.scalar_subquery())

    async def newest(self, project_id: ProjectId, group: str, kind: VersionKind | None) -> Version:
        """As the port says. An adapter counts once it is published."""
        usable = or_(versions.c.kind != VersionKind.ADAPTER, versions.c.state == VersionState.PUBLISHED)
        query = select(versions).where(
            and_(versions.c.project_id == project_id, versions.c.group_name == group, standing(), usable)
        )
        if kind is not None:
            query = query.where(versions.c.kind == kind)
        row = await self._transaction.first(query.order_by(versions.c.number.desc()).limit(1))
        if row is None:
            raise missing("version", f"{group}@latest")
        return version_of(row)

    async def by_name(self, session_id: SessionId, kind: VersionKind, name: str) -> Version | None:
        return await named(self._transaction, session_id, kind, name)

    async def page(
        self, project_id: ProjectId, wanted: VersionFilter, *, limit: int, after: VersionId | None, offset: int = 0
    ) -> Sequence[Version]:
        if not all(map(storable, filter(None, (wanted.group, wanted.session_id, wanted.tag)))):
            return []
        query = select(versions).where(and_(versions.c.project_id == project_id, *_conditions(wanted)))
        if after is not None:
            last = await self.get(project_id, after)
            query = query.where(
                or_(
                    versions.c.created_at < last.created_at,
                    and_(versions.c.created_at == last.created_at, versions.c.id < last.id),
                )
            )
        query = query.order_by(versions.c.created_at.desc(), versions.c.id.desc()).limit(limit).offset(offset)
        return [version_of(row) for row in await self._transaction.rows(query)]

    async def count(self, project_id: ProjectId, wanted: VersionFilter) -> int:
        rows = await self._transaction.rows(
            select(func.count().label("all"))
            .select_from(versions)
            .where(and_(versions.c.project_id == project_id, *_conditions(wanted)))
        )
        return rows[0]["all"]

    async def groups(self, project_id: ProjectId) -> Sequence[Group]:
        """By name."""
        known = await self._transaction.rows(
            select(groups).where(groups.c.project_id == project_id).order_by(groups.c.name)
        )
        sizes = await self._transaction.rows(
            select(versions.c.group_name, func.sum(versions.c.size_bytes).label("size_bytes"))
            .where(and_(versions.c.project_id == project_id, versions.c.purged_at.is_(None)))
            .group_by(versions.c.group_name)
        )
        highest = await self._transaction.rows(
            select(versions.c.group_name, versions.c.kind, func.max(versions.c.number).label("number"))
            .where(and_(versions.c.project_id == project_id, standing()))
            .group_by(versions.c.group_name, versions.c.kind)
        )
        named_so = await self._transaction.rows(
            select(aliases.c.group_name, aliases.c.alias, versions.c.number)
            .join(versions, versions.c.id == aliases.c.version_id)
            .where(aliases.c.project_id == project_id)
            .order_by(aliases.c.alias)
        )
        size_bytes = {row["group_name"]: int(row["size_bytes"]) for row in sizes}
        latest: defaultdict[str, dict[VersionKind, int]] = defaultdict(dict)
        for row in highest:
            latest[row["group_name"]][VersionKind(row["kind"])] = row["number"]
        alias: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for row in named_so:
            alias[row["group_name"]][row["alias"]] = row["number"]
        return [
            Group(
                name=row["name"],
                versions=row["versions"],
                size_bytes=size_bytes.get(row["name"], 0),
                created_at=row["created_at"],
                latest=dict(latest[row["name"]]),
                aliases=dict(alias[row["name"]]),
                description=row["description"] or "",
                user_metadata=row["user_metadata"] or {},
            )
            for row in known
        ]

    async def add_group(
        self, project_id: ProjectId, name: str, *, description: str, user_metadata: Mapping[str, str], at: datetime
    ) -> bool:
        for text in (name, description, *user_metadata, *user_metadata.values()):
            require_storable(text, "model_package_group")
        row = {
            "project_id": project_id,
            "name": name,
            "versions": 0,
            "created_at": at,
            "description": description or None,
            "user_metadata": dict(user_metadata) or None,
        }
        return bool(await self._transaction.insert_new(groups, row))

    async def group(self, project_id: ProjectId, name: str) -> Group:
        for group in await self.groups(project_id):
            if group.name == name:
                return group
        raise missing("group", name)

    async def awaiting_publication(self, limit: int) -> Sequence[Version]:
        rows = await self._transaction.rows(
            select(versions)
            .join(operations, operations.c.id == versions.c.operation_id)
            .where(
                and_(
                    versions.c.state == VersionState.STAGED,
                    versions.c.kind == VersionKind.ADAPTER,
                    operations.c.kind == OperationKind.SAVE_WEIGHTS,
                    operations.c.status == Status.RUNNING,
                )
            )
            .order_by(versions.c.created_at, versions.c.id)
            .limit(limit)
        )
        return [version_of(row) for row in rows]

    async def publish(self, version_id: VersionId, report: CanaryReport, *, at: datetime) -> None:
        """As the port says. Publishing twice keeps the first report.

        Raises:
            NotFound: no such version.
            Conflict: it was rejected.
        """
        row = await self._lock(version_id)
        version = version_of(row)
        if version.state is VersionState.PUBLISHED:
            return
        if version.state is VersionState.REJECTED:
            raise Conflict(f"{version.address} was rejected; it is never published", code="version_rejected")
        await self._transaction.write(
            update(versions)
            .where(versions.c.id == version_id)
            .values(state=VersionState.PUBLISHED.value, published_at=at, canary=asdict(report))
        )
        await self._move_latest(version)
        await self._end_save(version, save_result(version), at)

    async def reject(self, version_id: VersionId, failure: Failure, *, at: datetime) -> None:
        """As the port says. Rejecting twice keeps the first failure.

        Raises:
            NotFound: no such version.
            Conflict: it was published.
        """
        version = version_of(await self._lock(version_id))
        if version.state is VersionState.REJECTED:
            return
        if version.state is VersionState.PUBLISHED:
            raise Conflict(f"{version.address} is published; it cannot be rejected", code="version_published")
        await self._transaction.write(
            update(versions).where(versions.c.id == version_id).values(state=VersionState.REJECTED.value)
        )
        await self._end_save(version, failure, at)

    async def _only(self, project_id: ProjectId, address: str, *conditions: ColumnElement[bool]) -> Version:
        row = None
        if storable(address):
            row = await self._transaction.first(
                select(versions).where(and_(versions.c.project_id == project_id, *conditions))
            )
        if row is None:
            raise missing("version", address)
        return version_of(row)

    async def _lock(self, version_id: VersionId) -> RowMapping:
        require_id(version_id, "version")
        found = await self._transaction.first(select(versions.c.session_id).where(versions.c.id == version_id))
        if found is None:
            raise missing("version", version_id)
        await lock_session(self._transaction, SessionId(found["session_id"]))
        rows = await self._transaction.rows(select(versions).where(versions.c.id == version_id).with_for_update())
        return rows[0]

    async def _move_latest(self, version: Version) -> None:
        present = select(versions.c.seq).where(versions.c.id == sessions.c.latest_version_id).scalar_subquery()
        await self._transaction.write(
            update(sessions)
            .where(and_(sessions.c.id == version.session_id, func.coalesce(present, 0) < version.seq))
            .values(latest_version_id=version.id)
        )

    async def _end_save(self, version: Version, outcome: Outcome, at: datetime) -> None:
        row = await self._transaction.first(
            select(operations).where(
                and_(operations.c.id == version.operation_id, operations.c.status == Status.RUNNING)
            )
        )
        if row is not None:
            await record_outcome(self._transaction, row, outcome, at)
            await settle_stop(self._transaction, version.session_id)
        self._transaction.announce()


def _conditions(wanted: VersionFilter) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if wanted.group is not None:
        conditions.append(versions.c.group_name == wanted.group)
    if wanted.kind is not None:
        conditions.append(versions.c.kind == wanted.kind)
    if wanted.state is not None:
        conditions.append(versions.c.state == wanted.state)
    if wanted.session_id is not None:
        conditions.append(versions.c.session_id == wanted.session_id)
    if wanted.tag is not None:
        conditions.append(versions.c.tags.contains(f" {wanted.tag} ", autoescape=True))
    if wanted.named:
        conditions.append(versions.c.name.is_not(None))
    if not wanted.deleted:
        conditions.append(versions.c.deleted_at.is_(None))
    return conditions


async def register_version(
    transaction: Transaction, operation: RowMapping, version: NewVersion, at: datetime
) -> SaveResult:
    """Insert ``version`` under its group's next number; the operation's session is locked.

    The group's row stays locked until the transaction ends, so numbers have no gaps and no duplicates.

    Raises:
        Conflict: ``version_name_taken``.
    """
    require_storable(version.group, "model_package_group")
    project_id, session_id = operation["project_id"], operation["session_id"]
    if version.labels.name is not None and await named(transaction, session_id, version.kind, version.labels.name):
        raise name_taken(version.labels.name, version.kind)
    await transaction.insert_new(
        groups, {"project_id": project_id, "name": version.group, "versions": 0, "created_at": at}
    )
    numbered = await transaction.write_returning(
        update(groups)
        .where(and_(groups.c.project_id == project_id, groups.c.name == version.group))
        .values(versions=groups.c.versions + 1)
        .returning(groups.c.versions)
    )
    parent = await transaction.first(
        select(versions.c.id)
        .where(versions.c.session_id == session_id)
        .order_by(versions.c.seq.desc(), versions.c.created_at.desc())
        .limit(1)
    )
    row: Mapping[str, Any] = {
        "id": version.id,
        "project_id": project_id,
        "group_name": version.group,
        "number": numbered[0]["versions"],
        "kind": version.kind.value,
        "state": VersionState.STAGED.value,
        "session_id": session_id,
        "operation_id": operation["id"],
        "parent_id": parent["id"] if parent is not None else None,
        "base_model": version.base_model,
        **lora_columns(version.lora),
        "seq": version.seq,
        "optimizer_step": version.optimizer_step,
        "location": version.location,
        "manifest_sha256": version.manifest_sha256,
        "size_bytes": version.size_bytes,
        **label_columns(version.labels, at),
        "base_sha256": version.base_sha256,
        "code_version": version.code_version,
        "created_at": at,
    }
    await transaction.write(versions.insert().values(row))
    return SaveResult(
        version_id=version.id,
        group=version.group,
        number=row["number"],
        seq=version.seq,
        optimizer_step=version.optimizer_step,
    )


def save_result(version: Version) -> SaveResult:
    """Return what the save of ``version`` is answered with."""
    return SaveResult(
        version_id=version.id,
        group=version.group,
        number=version.number,
        seq=version.seq,
        optimizer_step=version.optimizer_step,
    )


async def version_of_operation(transaction: Transaction, operation_id: OperationId) -> Version | None:
    """Return the version that a save has made already."""
    row = await transaction.first(select(versions).where(versions.c.operation_id == operation_id))
    return None if row is None else version_of(row)


async def named(transaction: Transaction, session_id: SessionId, kind: VersionKind, name: str) -> Version | None:
    """Return what a session saved as ``kind`` under ``name``, deleted or not."""
    row = await transaction.first(
        select(versions).where(
            and_(versions.c.session_id == session_id, versions.c.kind == kind, versions.c.name == name)
        )
    )
    return None if row is None else version_of(row)
