"""VersionStore on SQL: model package groups and versions."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from sqlalchemy import RowMapping, and_, func, or_, select, update

from gateway.core.errors import Conflict
from gateway.core.ids import OperationId, ProjectId, SessionId, VersionId
from gateway.core.operations import Status
from gateway.core.payloads import OperationKind
from gateway.core.results import Failure, Outcome, SaveResult
from gateway.core.versions import CanaryReport, Group, NewVersion, Version, VersionKind, VersionState
from gateway.store.lora import lora_columns, lora_of
from gateway.store.operation_rows import record_outcome
from gateway.store.sessions import lock_session, settle_stop
from gateway.store.tables import groups, operations, sessions, versions
from gateway.store.text import missing, require_id, require_storable, storable
from gateway.store.transaction import Transaction


class SqlVersionStore:
    """VersionStore."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    async def get(self, project_id: ProjectId, version_id: VersionId) -> Version:
        require_id(version_id, "version")
        row = await self._transaction.first(
            select(versions).where(and_(versions.c.id == version_id, versions.c.project_id == project_id))
        )
        if row is None:
            raise missing("version", version_id)
        return version_of(row)

    async def by_address(self, project_id: ProjectId, group: str, number: int) -> Version:
        address = f"{group}@{number}"
        if not storable(group) or not 1 <= number < 2**31:
            raise missing("version", address)
        row = await self._transaction.first(
            select(versions).where(
                and_(
                    versions.c.project_id == project_id,
                    versions.c.group_name == group,
                    versions.c.number == number,
                )
            )
        )
        if row is None:
            raise missing("version", address)
        return version_of(row)

    async def page(
        self, project_id: ProjectId, *, group: str | None, limit: int, after: VersionId | None
    ) -> Sequence[Version]:
        query = select(versions).where(versions.c.project_id == project_id)
        if group is not None:
            if not storable(group):
                return []
            query = query.where(versions.c.group_name == group)
        if after is not None:
            last = await self.get(project_id, after)
            query = query.where(
                or_(
                    versions.c.created_at < last.created_at,
                    and_(versions.c.created_at == last.created_at, versions.c.id < last.id),
                )
            )
        query = query.order_by(versions.c.created_at.desc(), versions.c.id.desc()).limit(limit)
        return [version_of(row) for row in await self._transaction.rows(query)]

    async def groups(self, project_id: ProjectId) -> Sequence[Group]:
        """By name. ``latest`` is the highest number of each kind that was not rejected."""
        rows = await self._transaction.rows(
            select(groups).where(groups.c.project_id == project_id).order_by(groups.c.name)
        )
        highest = await self._transaction.rows(
            select(versions.c.group_name, versions.c.kind, func.max(versions.c.number).label("number"))
            .where(and_(versions.c.project_id == project_id, versions.c.state != VersionState.REJECTED))
            .group_by(versions.c.group_name, versions.c.kind)
        )
        latest: defaultdict[str, dict[VersionKind, int]] = defaultdict(dict)
        for row in highest:
            latest[row["group_name"]][VersionKind(row["kind"])] = row["number"]
        return [
            Group(
                name=row["name"],
                versions=row["versions"],
                created_at=row["created_at"],
                latest=dict(latest[row["name"]]),
            )
            for row in rows
        ]

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
        await self._end_save(version, SaveResult(version_id=version.id, group=version.group, number=version.number), at)

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


async def register_version(
    transaction: Transaction, operation: RowMapping, version: NewVersion, at: datetime
) -> SaveResult:
    """Insert ``version`` under its group's next number; the operation's session is locked.

    The group's row stays locked until the transaction ends, so numbers have no gaps and no duplicates.
    """
    for text, field in ((version.description, "description"), (version.group, "model_package_group")):
        require_storable(text, field)
    project_id, session_id = operation["project_id"], operation["session_id"]
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
        "description": version.description,
        "created_at": at,
    }
    await transaction.write(versions.insert().values(row))
    return SaveResult(version_id=version.id, group=version.group, number=row["number"])


async def version_of_operation(transaction: Transaction, operation_id: OperationId) -> Version | None:
    """Return the version that a save has made already."""
    row = await transaction.first(select(versions).where(versions.c.operation_id == operation_id))
    return None if row is None else version_of(row)


def version_of(row: RowMapping) -> Version:
    """Read a row of ``versions``."""
    return Version(
        id=VersionId(row["id"]),
        project_id=ProjectId(row["project_id"]),
        group=row["group_name"],
        number=row["number"],
        kind=VersionKind(row["kind"]),
        state=VersionState(row["state"]),
        session_id=SessionId(row["session_id"]),
        operation_id=OperationId(row["operation_id"]),
        parent_id=None if row["parent_id"] is None else VersionId(row["parent_id"]),
        base_model=row["base_model"],
        lora=lora_of(row),
        seq=row["seq"],
        optimizer_step=row["optimizer_step"],
        location=row["location"],
        manifest_sha256=row["manifest_sha256"],
        size_bytes=row["size_bytes"],
        description=row["description"],
        created_at=row["created_at"],
        published_at=row["published_at"],
        canary=None if row["canary"] is None else CanaryReport(**row["canary"]),
    )
