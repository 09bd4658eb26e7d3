"""Rows of ``operations``: how they are read, and how they end."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import RowMapping, and_, func, select, update

from gateway.core.codec import encode_outcome
from gateway.core.ids import KeyId, OperationId, ProjectId, SessionId
from gateway.core.operations import Operation, Progress, Status
from gateway.core.payloads import OperationKind
from gateway.core.results import Failure, Outcome
from gateway.store.blobs import SqlBlobStore
from gateway.store.line import Place
from gateway.store.tables import operations
from gateway.store.transaction import Transaction

WINDOW_ENDING = (OperationKind.OPTIM_STEP, OperationKind.LOAD_STATE)  # also when they fail


def operation_of(row: Mapping[Any, Any], *, place: Place | None = None, outcome: Outcome | None = None) -> Operation:
    """Read a row of ``operations``."""
    status = Status(row["status"])
    if status is not Status.QUEUED:
        place = None
    return Operation(
        id=OperationId(row["id"]),
        session_id=SessionId(row["session_id"]),
        project_id=ProjectId(row["project_id"]),
        key_id=KeyId(row["key_id"]),
        seq=row["seq"],
        kind=OperationKind(row["kind"]),
        status=status,
        payload_digest=row["payload_digest"],
        created_at=row["created_at"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        outcome=outcome,
        queue_position=place.position if place is not None else None,
        waits_for_seq=place.missing_seq if place is not None else None,
        progress=_progress_of(row) if status is Status.RUNNING else None,
        traceparent=row["traceparent"],
    )


def _progress_of(row: Mapping[Any, Any]) -> Progress | None:
    done, total = row["progress_done"], row["progress_total"]
    return None if done is None or total is None else Progress(done=done, total=total)


async def record_outcome(transaction: Transaction, row: RowMapping, outcome: Outcome, at: datetime) -> None:
    """Make the operation of ``row`` final, with its outcome in blobs. Its session is locked."""
    digest = await SqlBlobStore(transaction).put(ProjectId(row["project_id"]), encode_outcome(outcome))
    status = Status.FAILED if isinstance(outcome, Failure) else Status.COMPLETED
    await transaction.write(
        update(operations)
        .where(operations.c.id == row["id"])
        .values(status=status.value, staged=False, outcome_digest=digest, finished_at=at)
    )


async def discard_window(transaction: Transaction, session_id: SessionId, seq: int) -> None:
    """Mark the gradients accumulated before the failed operation ``seq`` as thrown away: a replay leaves them out."""
    ended = func.coalesce(
        select(func.max(operations.c.seq))
        .where(
            and_(
                operations.c.session_id == session_id,
                operations.c.seq < seq,
                operations.c.status == Status.COMPLETED,
                operations.c.kind.in_(WINDOW_ENDING),
            )
        )
        .scalar_subquery(),
        0,
    )
    await transaction.write(
        update(operations)
        .where(
            and_(
                operations.c.session_id == session_id,
                operations.c.seq < seq,
                operations.c.seq > ended,
                operations.c.kind == OperationKind.FORWARD_BACKWARD,
                operations.c.status == Status.COMPLETED,
            )
        )
        .values(window_discarded=True)
    )
