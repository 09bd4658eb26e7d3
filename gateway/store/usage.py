"""UsageStore on SQL: facts that count once, whatever is retried."""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime

from sqlalchemy import func, select

from gateway.core.ids import KeyId, ProjectId, SessionId, VersionId
from gateway.core.usage import Meter, UsageFact, UsageTotal
from gateway.store.tables import usage_facts
from gateway.store.transaction import Transaction


class SqlUsageStore:
    """UsageStore. ``since`` is inclusive, ``until`` exclusive."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    async def add(self, facts: Sequence[UsageFact]) -> None:
        rows = [{**asdict(fact), "meter": fact.meter.value} for fact in facts]
        if rows:
            await self._transaction.insert_new(usage_facts, rows)

    async def totals(
        self,
        project_id: ProjectId,
        *,
        session_id: SessionId | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> Sequence[UsageTotal]:
        by = (usage_facts.c.key_id, usage_facts.c.session_id, usage_facts.c.base_model, usage_facts.c.meter)
        query = select(*by, func.sum(usage_facts.c.quantity).label("quantity")).where(
            usage_facts.c.project_id == project_id
        )
        if session_id is not None:
            query = query.where(usage_facts.c.session_id == session_id)
        if since is not None:
            query = query.where(usage_facts.c.at >= since)
        if until is not None:
            query = query.where(usage_facts.c.at < until)
        rows = await self._transaction.rows(query.group_by(*by).order_by(*by))
        return [
            UsageTotal(
                key_id=KeyId(row["key_id"]),
                session_id=None if row["session_id"] is None else SessionId(row["session_id"]),
                base_model=row["base_model"],
                meter=Meter(row["meter"]),
                quantity=int(row["quantity"]),
            )
            for row in rows
        ]

    async def of_source(self, source: str) -> Sequence[UsageFact]:
        rows = await self._transaction.rows(
            select(usage_facts).where(usage_facts.c.source == source).order_by(usage_facts.c.meter)
        )
        return [
            UsageFact(
                source=row["source"],
                meter=Meter(row["meter"]),
                quantity=row["quantity"],
                project_id=ProjectId(row["project_id"]),
                key_id=KeyId(row["key_id"]),
                session_id=None if row["session_id"] is None else SessionId(row["session_id"]),
                version_id=None if row["version_id"] is None else VersionId(row["version_id"]),
                base_model=row["base_model"],
                at=row["at"],
            )
            for row in rows
        ]
