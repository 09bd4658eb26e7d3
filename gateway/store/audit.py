"""AuditStore on SQL."""

from collections.abc import Sequence

from sqlalchemy import select

from gateway.core.audit import AuditEntry
from gateway.core.ids import KeyId, ProjectId, new_event_id
from gateway.store.audit_tables import audit
from gateway.store.text import require_storable
from gateway.store.transaction import Transaction


class SqlAuditStore:
    """AuditStore."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    async def add(
        self,
        project_id: ProjectId,
        *,
        actor: KeyId | None,
        action: str,
        subject: str,
        request_id: str | None = None,
    ) -> None:
        await self._transaction.write(
            audit.insert().values(
                id=new_event_id(),
                at=self._transaction.clock.now(),
                project_id=project_id,
                actor=actor,
                action=action,
                subject=subject.replace("\0", ""),
                request_id=request_id,
            )
        )

    async def page(self, project_id: ProjectId | None, *, limit: int, after: str | None) -> Sequence[AuditEntry]:
        require_storable(after, "after")
        query = select(audit).order_by(audit.c.id.desc()).limit(limit)
        if project_id is not None:
            query = query.where(audit.c.project_id == project_id)
        if after is not None:
            query = query.where(audit.c.id < after)
        return [
            AuditEntry(
                id=row["id"],
                at=row["at"],
                project_id=ProjectId(row["project_id"]),
                actor=None if row["actor"] is None else KeyId(row["actor"]),
                action=row["action"],
                subject=row["subject"],
                request_id=row["request_id"],
            )
            for row in await self._transaction.rows(query)
        ]
