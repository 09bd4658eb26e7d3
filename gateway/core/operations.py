"""Operations: one queued piece of work on a training session.

Invariant: within a session, ``seq`` names at most one operation, and operations run in ``seq`` order. Clients lean
on it to retry blindly and to pipeline ``optim_step`` behind an unfinished ``forward_backward``.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from gateway.core.ids import KeyId, OperationId, ProjectId, SessionId
from gateway.core.payloads import OperationKind
from gateway.core.results import Outcome

MAX_SEQ = 2**31 - 1


class Status(StrEnum):
    """Where an operation stands. The trainer alone moves it out of queued, except that a stop skips it."""

    QUEUED = "queued"
    RUNNING = "running"  # being computed, or staged and waiting for the publish gate
    COMPLETED = "completed"
    FAILED = "failed"
    SKIPPED = "skipped"  # the session stopped or failed before it ran
    CANCELLED = "cancelled"  # an operation that was refused when it was submitted: it holds its seq


MOVES: dict[Status, frozenset[Status]] = {
    Status.QUEUED: frozenset({Status.RUNNING, Status.FAILED, Status.SKIPPED, Status.CANCELLED}),
    Status.RUNNING: frozenset({Status.COMPLETED, Status.FAILED}),
    Status.COMPLETED: frozenset(),
    Status.FAILED: frozenset(),
    Status.SKIPPED: frozenset(),
    Status.CANCELLED: frozenset(),
}

FINAL = frozenset(status for status, moves in MOVES.items() if not moves)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Datums computed, and datums to compute."""

    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation as recorded. ``outcome`` is present exactly when the status is completed or failed.

    ``progress`` is known of forward and forward_backward that run for a while.
    """

    id: OperationId
    session_id: SessionId
    project_id: ProjectId
    key_id: KeyId
    seq: int
    kind: OperationKind
    status: Status
    payload_digest: str
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    outcome: Outcome | None
    queue_position: int | None  # operations of the session before this one; None once it runs
    waits_for_seq: int | None  # a missing seq that holds this one back
    progress: Progress | None
    traceparent: str | None = None  # of the request that submitted it, where somebody traces

    @property
    def final(self) -> bool:
        return self.status in FINAL
