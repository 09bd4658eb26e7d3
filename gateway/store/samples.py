"""SampleStore on SQL: calls that run, and the first answer to an idempotency key, kept 24 hours.

A running call is leased by the gateway that runs it. One whose lease ran out can be taken from it, and is lost from
then on: the row, not a clock, says so, for a day, and its gateway can neither renew nor answer it any more.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, RowMapping, and_, delete, select, update

from gateway.core.ids import ProjectId, SampleId
from gateway.core.ports import RunningSample, StoredSample
from gateway.store.blobs import KEPT, SqlBlobStore
from gateway.store.client_tables import running_samples
from gateway.store.tables import samples
from gateway.store.text import missing, require_id, require_storable, storable
from gateway.store.transaction import Transaction

_IDS_PER_QUERY = 500
_NOBODY = ""  # the owner of a call that is lost


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
        return None if row is None else await self._stored(row)

    async def get(self, project_id: ProjectId, sample_id: SampleId) -> StoredSample | RunningSample:
        require_id(sample_id, "sample")
        row = await self._transaction.first(
            select(samples).where(
                and_(
                    samples.c.id == sample_id,
                    samples.c.project_id == project_id,
                    samples.c.created_at > self._transaction.clock.now() - KEPT,
                )
            )
        )
        if row is not None:
            return await self._stored(row)
        running = await self._running(running_samples.c.id == sample_id, project_id)
        if running is None:
            raise missing("sample", sample_id)
        return running

    async def add(self, project_id: ProjectId, sample: StoredSample) -> bool:
        require_storable(sample.key, "Idempotency-Key")
        now = self._transaction.clock.now()
        await self._transaction.write(
            delete(samples).where(
                and_(
                    samples.c.project_id == project_id,
                    samples.c.idempotency_key == sample.key,
                    samples.c.created_at <= now - KEPT,
                )
            )
        )
        row = {
            "id": sample.id,
            "project_id": project_id,
            "idempotency_key": sample.key,
            "request_digest": sample.request_digest,
            "content_digest": await self._blobs.put(project_id, sample.content),
            "created_at": now,
        }
        return bool(await self._transaction.insert_new(samples, row))

    async def begin(
        self, project_id: ProjectId, sample: RunningSample, *, lease_s: float
    ) -> RunningSample | StoredSample:
        require_storable(sample.key, "Idempotency-Key")
        row = {
            "id": sample.id,
            "project_id": project_id,
            "idempotency_key": sample.key,
            "request_digest": sample.request_digest,
            "owner": sample.owner,
            "lease_until": self._transaction.clock.now() + timedelta(seconds=lease_s),
        }
        while not await self._transaction.insert_new(running_samples, row):
            known = await self._running(running_samples.c.idempotency_key == sample.key, project_id)
            if known is not None:  # else it ended since
                return known
        # Only now: a call under the key that ends meanwhile is in one of the two tables when the row is in.
        answered = await self.by_idempotency_key(project_id, sample.key)
        if answered is None:
            return sample
        await self._transaction.write(delete(running_samples).where(running_samples.c.id == sample.id))
        return answered

    async def end(self, project_id: ProjectId, sample_id: SampleId, content: bytes, *, owner: str) -> bool:
        mine = and_(
            running_samples.c.id == sample_id,
            running_samples.c.project_id == project_id,
            running_samples.c.owner == owner,
        )
        ended = await self._transaction.write_returning(
            delete(running_samples)
            .where(mine)
            .returning(running_samples.c.idempotency_key, running_samples.c.request_digest)
        )
        if not ended:
            return bool(await self._transaction.rows(select(samples.c.id).where(samples.c.id == sample_id)))
        key, digest = ended[0]["idempotency_key"], ended[0]["request_digest"]
        stored = StoredSample(id=sample_id, key=key, request_digest=digest, content=content)
        self._transaction.announce()
        return await self.add(project_id, stored)

    async def renew(self, ids: Sequence[SampleId], *, owner: str, lease_s: float) -> None:
        lease_until = self._transaction.clock.now() + timedelta(seconds=lease_s)
        for some in _chunks(ids):
            await self._transaction.write(
                update(running_samples)
                .where(and_(running_samples.c.id.in_(some), running_samples.c.owner == owner))
                .values(lease_until=lease_until)
            )

    async def lose(self, *, expired_by: datetime) -> Sequence[SampleId]:
        lost = await self._transaction.write_returning(
            update(running_samples)
            .where(and_(running_samples.c.lease_until <= expired_by, running_samples.c.owner != _NOBODY))
            .values(owner=_NOBODY)
            .returning(running_samples.c.id)
        )
        if lost:
            self._transaction.announce()
        return [SampleId(row["id"]) for row in lost]

    async def final_among(self, ids: Sequence[SampleId]) -> Sequence[SampleId]:
        running: set[str] = set()
        for some in _chunks(ids):
            rows = await self._transaction.rows(
                select(running_samples.c.id).where(
                    and_(running_samples.c.id.in_(some), running_samples.c.owner != _NOBODY)
                )
            )
            running |= {row["id"] for row in rows}
        return [id for id in ids if id not in running]

    async def forget_lost(self, *, older_than: datetime) -> None:
        await self._transaction.write(delete(running_samples).where(running_samples.c.lease_until < older_than))

    async def _running(self, which: ColumnElement[bool], project_id: ProjectId) -> RunningSample | None:
        row = await self._transaction.first(
            select(running_samples).where(and_(which, running_samples.c.project_id == project_id))
        )
        if row is None:
            return None
        return RunningSample(
            id=SampleId(row["id"]),
            key=row["idempotency_key"],
            request_digest=row["request_digest"],
            owner=row["owner"],
            lost=row["owner"] == _NOBODY,
        )

    async def _stored(self, row: RowMapping) -> StoredSample:
        return StoredSample(
            id=SampleId(row["id"]),
            key=row["idempotency_key"],
            request_digest=row["request_digest"],
            content=await self._blobs.get(ProjectId(row["project_id"]), row["content_digest"]),
        )


def _chunks(ids: Sequence[SampleId]) -> Iterator[Sequence[SampleId]]:
    return (ids[start : start + _IDS_PER_QUERY] for start in range(0, len(ids), _IDS_PER_QUERY))
