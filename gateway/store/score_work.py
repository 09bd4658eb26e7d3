"""ScoreWorkStore on SQL: who computes which score, and who may write its result.

A score is leased alone, and every claim counts: ``(owner, attempts)`` fences, so a trainer that lost its lease cannot
write over the one that took the score after it.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, and_, func, or_, select, update

from gateway.core.codec import decode_score_request, encode_score_outcome
from gateway.core.errors import NotFound
from gateway.core.ids import ProjectId
from gateway.core.operations import FINAL, Status
from gateway.core.ports import ScoreWork, StaleLease
from gateway.core.results import Failure
from gateway.core.scores import KEPT, Score, ScoreOutcome
from gateway.core.usage import UsageFact
from gateway.core.versions import Version
from gateway.store.blobs import SqlBlobStore
from gateway.store.scores import score_of
from gateway.store.tables import scores
from gateway.store.transaction import Transaction
from gateway.store.usage import SqlUsageStore
from gateway.store.versions import SqlVersionStore


class SqlScoreWorkStore:
    """ScoreWorkStore."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._blobs = SqlBlobStore(transaction)
        self._usage = SqlUsageStore(transaction)
        self._versions = SqlVersionStore(transaction)

    async def waiting(self, *, base_model: str, at: datetime) -> bool:
        return await self._transaction.first(select(scores.c.id).where(_ready(base_model, at)).limit(1)) is not None

    async def claim(self, *, owner: str, base_model: str, lease_s: float, at: datetime) -> ScoreWork | None:
        served = scores.alias("served")
        last_served = (
            select(func.max(served.c.started_at)).where(served.c.project_id == scores.c.project_id).scalar_subquery()
        )
        row = await self._transaction.first(
            select(scores)
            .where(_ready(base_model, at))
            .order_by(last_served.asc().nulls_first(), scores.c.created_at, scores.c.id)
            .limit(1)
            .with_for_update(of=scores, skip_locked=True)
        )
        if row is None:
            return None
        attempts: int = row["attempts"] + 1
        taken = {
            "status": Status.RUNNING.value,
            "attempts": attempts,
            "started_at": at,
            "lease_owner": owner,
            "lease_until": at + timedelta(seconds=lease_s),
        }
        await self._transaction.write(update(scores).where(scores.c.id == row["id"]).values(**taken))
        score = score_of({**row, **taken})
        request = decode_score_request(await self._blobs.get(score.project_id, row["payload_digest"]))
        return ScoreWork(
            score=score,
            request=request,
            version=await self._version(score),
            owner=owner,
            attempts=attempts,
        )

    async def _version(self, score: Score) -> Version | None:
        if score.version_id is None:
            return None
        try:
            return await self._versions.get(score.project_id, score.version_id)
        except NotFound:
            return None

    async def renew(self, *, owner: str, lease_s: float, at: datetime) -> None:
        await self._transaction.write(
            update(scores)
            .where(
                and_(
                    scores.c.status == Status.RUNNING,
                    scores.c.lease_owner == owner,
                    scores.c.lease_until > at,
                )
            )
            .values(lease_until=at + timedelta(seconds=lease_s))
        )

    async def finish(self, work: ScoreWork, outcome: ScoreOutcome, *, facts: Sequence[UsageFact], at: datetime) -> None:
        """As the port says."""
        row = await self._transaction.first(
            select(scores.c.project_id, scores.c.status, scores.c.lease_owner, scores.c.attempts)
            .where(scores.c.id == work.score.id)
            .with_for_update()
        )
        if row is not None and row["status"] in FINAL and row["attempts"] == work.attempts:
            return
        if row is None or row["lease_owner"] != work.owner or row["attempts"] != work.attempts:
            raise StaleLease(f"{work.owner} no longer holds score {work.score.id} by attempt {work.attempts}")
        digest = await self._blobs.put(ProjectId(row["project_id"]), encode_score_outcome(outcome))
        await self._transaction.write(
            update(scores)
            .where(scores.c.id == work.score.id)
            .values(
                status=(Status.FAILED if isinstance(outcome, Failure) else Status.COMPLETED).value,
                outcome_digest=digest,
                finished_at=at,
                lease_owner=None,
                lease_until=None,
            )
        )
        await self._usage.add(facts)
        self._transaction.announce()


def _ready(base_model: str, at: datetime) -> ColumnElement[bool]:
    """Queued, or left running by a trainer whose lease ran out; and not too old for anybody to read the result."""
    return and_(
        scores.c.base_model == base_model,
        scores.c.created_at > at - KEPT,
        scores.c.status.in_([Status.QUEUED.value, Status.RUNNING.value]),
        or_(scores.c.status == Status.QUEUED, scores.c.lease_until <= at),
    )
