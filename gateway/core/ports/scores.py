"""Scores: asked for by the edge, computed by any trainer of their base model."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from gateway.core.ids import KeyId, ProjectId, ScoreId, SessionId
from gateway.core.scores import Score, ScoreOutcome, ScoreRequest
from gateway.core.usage import UsageFact
from gateway.core.versions import Version


class ScoreStore(Protocol):
    """The edge's side. A score older than ``scores.KEPT`` is gone, whether it was computed or not."""

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
        """Queue a score, or return the one that was queued under this key.

        Raises:
            Conflict: the key was used for another request.
        """
        ...

    async def get(self, project_id: ProjectId, score_id: ScoreId) -> Score:
        """Raises NotFound."""
        ...

    async def by_idempotency_key(self, project_id: ProjectId, key: str) -> Score | None: ...

    async def final_among(self, ids: Sequence[ScoreId]) -> Sequence[ScoreId]:
        """Return those of ``ids`` that are final. One query for all waiters."""
        ...

    async def cancel(self, score_id: ScoreId) -> None:
        """Nobody waits for it any more: it is not computed, unless it is already."""
        ...

    async def forget(self, at: datetime) -> int:
        """Delete what is too old to be read; return how many."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreWork:
    """One score to compute now. ``attempts`` counts claims, this one included, and fences: it grows with each.

    ``version`` is None for the base model, and when the version that was asked for exists no more.
    """

    score: Score
    request: ScoreRequest
    version: Version | None
    owner: str
    attempts: int


class ScoreWorkStore(Protocol):
    """The trainer's side."""

    async def waiting(self, *, base_model: str, at: datetime) -> bool:
        """Say whether ``claim`` would hand one out; a read."""
        ...

    async def claim(self, *, owner: str, base_model: str, lease_s: float, at: datetime) -> ScoreWork | None:
        """Take the oldest one of the project that was served least recently, one whose lease ran out included."""
        ...

    async def renew(self, *, owner: str, lease_s: float, at: datetime) -> None:
        """Extend the leases of ``owner`` that have not run out."""
        ...

    async def finish(self, work: ScoreWork, outcome: ScoreOutcome, *, facts: Sequence[UsageFact], at: datetime) -> None:
        """Record the outcome with its usage. Reporting again what is recorded already is a no-op.

        Raises:
            StaleLease: it was handed out again meanwhile, or is gone; nothing was written.
        """
        ...
