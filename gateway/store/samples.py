"""SampleStore on SQL: the first answer to an idempotency key, kept 24 hours."""

from sqlalchemy import and_, delete, select

from gateway.core.ids import ProjectId, SampleId
from gateway.core.ports import StoredSample
from gateway.store.blobs import KEPT, SqlBlobStore
from gateway.store.tables import samples
from gateway.store.text import require_storable, storable
from gateway.store.transaction import Transaction


class SqlSampleStore:
    """SampleStore. Of two answers added under one key, the first stays."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._blobs = SqlBlobStore(transaction)

    async def by_idempotency_key(self, project_id: ProjectId, key: str) -> StoredSample | None:
        if not storable(key):
            return None
        row = await self._transaction.first(
            select(samples).where(
                and_(
                    samples.c.project_id == project_id,
                    samples.c.idempotency_key == key,
                    samples.c.created_at > self._transaction.clock.now() - KEPT,
                )
            )
        )
        if row is None:
            return None
        return StoredSample(
            id=SampleId(row["id"]),
            request_digest=row["request_digest"],
            content=await self._blobs.get(project_id, row["content_digest"]),
        )

    async def add(self, project_id: ProjectId, key: str, sample: StoredSample) -> None:
        require_storable(key, "Idempotency-Key")
        now = self._transaction.clock.now()
        await self._transaction.write(
            delete(samples).where(
                and_(
                    samples.c.project_id == project_id,
                    samples.c.idempotency_key == key,
                    samples.c.created_at <= now - KEPT,
                )
            )
        )
        row = {
            "id": sample.id,
            "project_id": project_id,
            "idempotency_key": key,
            "request_digest": sample.request_digest,
            "content_digest": await self._blobs.put(project_id, sample.content),
            "created_at": now,
        }
        await self._transaction.insert_new(samples, row)
