"""ScoreStore on SQL: scores from their asking to the end of the 24 hours in which they can be read."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, RowMapping, and_, delete, select, update

from gateway.core.codec import decode_score_outcome, encode_score_request
from gateway.core.errors import Conflict
from gateway.core.ids import KeyId, ProjectId, ScoreId, SessionId, VersionId, new_score_id
from gateway.core.operations import FINAL, Status
from gateway.core.scores import KEPT, Score, ScoreOutcome, ScoreRequest
from gateway.store.blobs import SqlBlobStore
from gateway.store.tables import scores
from gateway.store.text import missing, require_id, require_storable, storable
from gateway.store.transaction import Transaction

_IDS_PER_QUERY = 500


class SqlScoreStore:
    """ScoreStore. Of two requests under one key the first stays."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._blobs = SqlBlobStore(transaction)

    async def add(
        self,
        request: ScoreRequest,
        *,
        project_id: ProjectId,
        key_id: KeyId,
        session_id: SessionId | None,
        idempotency_key: str | None,
        request_digest: str,
    ) -> Score:
        require_storable(idempotency_key, "Idempotency-Key")
        now = self._transaction.clock.now()
        if idempotency_key is not None:
            mine = and_(scores.c.project_id == project_id, scores.c.idempotency_key == idempotency_key)
            await self._transaction.write(delete(scores).where(and_(mine, scores.c.created_at <= now - KEPT)))
        row = {
            "id": new_score_id(),
            "project_id": project_id,
            "key_id": key_id,
            "session_id": session_id,
            "base_model": request.base_model,
            "version_id": request.version_id,
            "status": Status.QUEUED.value,
            "request_digest": request_digest,
            "payload_digest": await self._blobs.accept(project_id, encode_score_request(request)),
            "idempotency_key": idempotency_key,
            "attempts": 0,
            "created_at": now,
        }
        if await self._transaction.insert_new(scores, row):
            self._transaction.announce()
            return score_of(row)
        known = None if idempotency_key is None else await self.by_idempotency_key(project_id, idempotency_key)
        if known is None or known.request_digest != request_digest:
            raise Conflict(
                "this Idempotency-Key was already used for another request",
                code="idempotency_key_reused",
                field="Idempotency-Key",
            )
        return known

    async def get(self, project_id: ProjectId, score_id: ScoreId) -> Score:
        require_id(score_id, "score")
        row = await self._readable(and_(scores.c.project_id == project_id, scores.c.id == score_id))
        if row is None:
            raise missing("score", score_id)
        return await self._with_outcome(row)

    async def by_idempotency_key(self, project_id: ProjectId, key: str) -> Score | None:
        if not storable(key):
            return None
        row = await self._readable(and_(scores.c.project_id == project_id, scores.c.idempotency_key == key))
        return None if row is None else await self._with_outcome(row)

    async def final_among(self, ids: Sequence[ScoreId]) -> Sequence[ScoreId]:
        final: list[ScoreId] = []
        for start in range(0, len(ids), _IDS_PER_QUERY):
            some = and_(scores.c.id.in_(ids[start : start + _IDS_PER_QUERY]), scores.c.status.in_(FINAL))
            final += [ScoreId(row["id"]) for row in await self._transaction.rows(select(scores.c.id).where(some))]
        return final

    async def cancel(self, score_id: ScoreId) -> None:
        await self._transaction.write(
            update(scores)
            .where(and_(scores.c.id == score_id, scores.c.status == Status.QUEUED))
            .values(status=Status.CANCELLED.value, finished_at=self._transaction.clock.now())
        )

    async def forget(self, at: datetime) -> int:
        """As the port says. Blobs stay: others may hold the same content."""
        return await self._transaction.write(delete(scores).where(scores.c.created_at <= at - KEPT))

    async def _readable(self, which: ColumnElement[bool]) -> RowMapping | None:
        oldest = self._transaction.clock.now() - KEPT
        return await self._transaction.first(select(scores).where(and_(which, scores.c.created_at > oldest)))

    async def _with_outcome(self, row: RowMapping) -> Score:
        if row["outcome_digest"] is None:
            return score_of(row)
        record = await self._blobs.get(ProjectId(row["project_id"]), row["outcome_digest"])
        return score_of(row, outcome=decode_score_outcome(record))


def score_of(row: Mapping[Any, Any], *, outcome: ScoreOutcome | None = None) -> Score:
    """Read a row of ``scores``."""
    return Score(
        id=ScoreId(row["id"]),
        project_id=ProjectId(row["project_id"]),
        key_id=KeyId(row["key_id"]),
        session_id=None if row["session_id"] is None else SessionId(row["session_id"]),
        base_model=row["base_model"],
        version_id=None if row["version_id"] is None else VersionId(row["version_id"]),
        status=Status(row["status"]),
        request_digest=row["request_digest"],
        created_at=row["created_at"],
        outcome=outcome,
    )
