"""CollectionStore on SQL.

A blob is needed while any row with a column ``..._digest`` names it, with two exceptions: the body of an operation that
is final and behind its session's last snapshot (or whose session ended), and the result of a forward pass a day after.
Who stores a blob again refreshes its ``created_at`` under the row's lock, so that a blob that is just being named is
never old enough to go.
"""

import asyncio
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Column, ColumnElement, Select, and_, delete, func, or_, select, true, tuple_, update

from gateway.core.ids import ProjectId
from gateway.core.payloads import OperationKind
from gateway.core.ports.collection import BlobName
from gateway.store.blobs import KEPT, UNNAMED, remove_blob_file
from gateway.store.sessions import OPEN
from gateway.store.tables import LIVE, blobs, metadata, operations, samples, sessions
from gateway.store.transaction import Transaction
from gateway.store.version_tables import versions

_READ_ONCE = (OperationKind.FORWARD, OperationKind.FORWARD_BACKWARD)  # whose results are large


class SqlCollectionStore:
    """CollectionStore."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    async def unneeded(
        self, *, after: BlobName | None, limit: int, at: datetime
    ) -> tuple[Sequence[BlobName], BlobName | None]:
        query = select(blobs.c.project_id, blobs.c.digest).where(blobs.c.created_at < at - UNNAMED)
        if after is not None:
            query = query.where(tuple_(blobs.c.project_id, blobs.c.digest) > tuple_(*after))
        rows = await self._transaction.rows(query.order_by(blobs.c.project_id, blobs.c.digest).limit(limit))
        seen = [(ProjectId(row["project_id"]), str(row["digest"])) for row in rows]
        needed = await self._needed(seen, at)
        return [name for name in seen if name not in needed], seen[-1] if len(seen) == limit else None

    async def remove(self, names: Collection[BlobName], *, at: datetime) -> int:
        """As the port says. A file goes before the commit: who stores the blob again then writes it again."""
        needed = await self._needed(names, at)
        removed: list[BlobName] = []
        for project_id, digest in names:
            old = and_(blobs.c.project_id == project_id, blobs.c.digest == digest, blobs.c.created_at < at - UNNAMED)
            if (project_id, digest) not in needed and await self._transaction.write(delete(blobs).where(old)):
                removed.append((project_id, digest))
        for project_id, digest in removed:  # most were rows and have no file
            await asyncio.to_thread(remove_blob_file, self._transaction.blob_dir, project_id, digest)
        return len(removed)

    async def forget_snapshots(self, limit: int) -> Sequence[str]:
        rows = await self._transaction.rows(
            select(sessions.c.id, sessions.c.snapshot_location)
            .where(and_(sessions.c.status.not_in(LIVE), sessions.c.snapshot_location.is_not(None)))
            .limit(limit)
        )
        await self._transaction.write(
            update(sessions)
            .where(sessions.c.id.in_([row["id"] for row in rows]))
            .values(snapshot_seq=None, snapshot_location=None)
        )
        return [row["snapshot_location"] for row in rows]

    async def known(self, locations: Collection[str]) -> Collection[str]:
        found: set[str] = set()
        kept = versions.c.purged_at.is_(None)
        for column, counts in ((versions.c.location, kept), (sessions.c.snapshot_location, true())):
            rows = await self._transaction.rows(
                select(column.label("location")).where(and_(column.in_(list(locations)), counts))
            )
            found |= {row["location"] for row in rows}
        return found

    async def forget_answers(self, at: datetime) -> int:
        return await self._transaction.write(delete(samples).where(samples.c.created_at <= at - KEPT))

    async def _needed(self, names: Collection[BlobName], at: datetime) -> set[BlobName]:
        needed: set[BlobName] = set()
        digests = [digest for _, digest in names]
        for column, condition in _references(at):
            rows = await self._transaction.rows(_naming(column).where(and_(column.in_(digests), condition)).distinct())
            needed |= {(ProjectId(row["project_id"]), str(row["digest"])) for row in rows}
        return needed


def blob_columns() -> list[Column[Any]]:
    """Return every column that names a blob. Requests are known by their digest too, but are not stored."""
    return [
        column
        for table in metadata.sorted_tables
        for column in table.columns
        if column.name.endswith("_digest") and column.name != "request_digest"
    ]


def _references(at: datetime) -> Iterator[tuple[Column[Any], ColumnElement[bool]]]:
    for column in blob_columns():
        if column is operations.c.payload_digest:
            behind = operations.c.seq <= func.coalesce(sessions.c.snapshot_seq, 0)
            yield column, or_(operations.c.status.in_(OPEN), and_(sessions.c.status.in_(LIVE), ~behind))
        elif column is operations.c.outcome_digest:
            yield column, or_(operations.c.kind.not_in(_READ_ONCE), operations.c.finished_at > at - KEPT)
        else:
            yield column, column.is_not(None)


def _naming(column: Column[Any]) -> Select[Any, Any]:
    query = select(column.table.c.project_id, column.label("digest"))
    return query.join(sessions, operations.c.session_id == sessions.c.id) if column.table is operations else query
