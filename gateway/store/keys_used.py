"""Idempotency keys are remembered for a day; then they may be used again."""

from sqlalchemy import Table, and_, update

from gateway.core.ids import ProjectId
from gateway.store.blobs import KEPT
from gateway.store.transaction import Transaction


async def free_key(transaction: Transaction, table: Table, project_id: ProjectId, key: str) -> None:
    """Take ``key`` from the row of ``table`` that used it more than a day ago, if there is one."""
    await transaction.write(
        update(table)
        .where(
            and_(
                table.c.project_id == project_id,
                table.c.idempotency_key == key,
                table.c.created_at <= transaction.clock.now() - KEPT,
            )
        )
        .values(idempotency_key=None)
    )
