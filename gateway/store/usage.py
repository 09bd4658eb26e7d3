"""UsageStore on SQL: facts that count once, whatever is retried."""

from collections.abc import Sequence
from dataclasses import fields

from sqlalchemy import select

from gateway.core.ids import KeyId, ProjectId, SessionId, VersionId
from gateway.core.usage import Meter, UsageFact
from gateway.store.tables import usage_facts
from gateway.store.transaction import Transaction

_COLUMNS = [field.name for field in fields(UsageFact)]


class SqlUsageStore:
    """UsageStore."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    async def add(self, facts: Sequence[UsageFact]) -> None:
        # In one order, so that two who record the same facts at once do not wait for each other.
        ordered = sorted(facts, key=lambda fact: (fact.source, fact.meter))
        rows = [{name: getattr(fact, name) for name in _COLUMNS} for fact in ordered]
        if rows:
            await self._transaction.insert_new(usage_facts, rows)

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
                tag=row["tag"],
                engine=row["engine"],
            )
            for row in rows
        ]
