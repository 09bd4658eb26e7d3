"""Gaps that never filled: operations that wait for a missing seq fail after a deadline."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, and_, exists, select, update

from gateway.core.errors import Kind
from gateway.core.ids import OperationId, SessionId
from gateway.core.operations import Status
from gateway.core.results import Failure
from gateway.core.sessions import OrderRule
from gateway.store.operation_rows import WINDOW_ENDING, discard_window, record_outcome
from gateway.store.refusals import passed, refused_after
from gateway.store.sessions import ACCEPTING, OPEN
from gateway.store.tables import operations, sessions
from gateway.store.transaction import Transaction


async def fail_gaps(transaction: Transaction, *, older_than: datetime) -> Sequence[OperationId]:
    """Fail operations that have waited for a missing seq since before ``older_than``, naming that seq.

    The missing seq is given up (a late one is refused), and as nobody knows what it held, the gradient window counts
    as incomplete: the next optim_step fails instead of stepping on a part. One that fails here is that next one, and
    ends the window.
    """
    rows = await transaction.rows(
        select(sessions.c.id)
        .where(
            and_(
                sessions.c.order_rule == OrderRule.STRICT,
                sessions.c.status.in_(ACCEPTING),
                ~_has_next_operation(),
                sessions.c.id.in_(
                    select(operations.c.session_id).where(
                        and_(operations.c.status == Status.QUEUED, operations.c.created_at < older_than)
                    )
                ),
            )
        )
        .order_by(sessions.c.id)
        .with_for_update(of=sessions, skip_locked=True, key_share=True)
    )
    failed: list[OperationId] = []
    for row in rows:
        failed += await _fail_gaps_of(transaction, row["id"], older_than)
    return failed


async def _fail_gaps_of(transaction: Transaction, session_id: SessionId, older_than: datetime) -> list[OperationId]:
    session = (await transaction.rows(select(sessions).where(sessions.c.id == session_id)))[0]
    waiting = await transaction.rows(
        select(operations)
        .where(and_(operations.c.session_id == session_id, operations.c.status.in_(OPEN), ~operations.c.staged))
        .order_by(operations.c.seq)
    )
    refused = await refused_after(transaction, session)
    applied_seq, broken_by = session["applied_seq"], session["window_broken_by"]
    missing_seq: int | None = None
    failed: list[OperationId] = []
    for index, row in enumerate(waiting):
        if row["seq"] > applied_seq + 1:
            if not any(later["created_at"] < older_than for later in waiting[index:]):
                break
            missing_seq = applied_seq + 1
            broken_by = broken_by or missing_seq
            applied_seq = row["seq"] - 1
        if missing_seq is None or row["created_at"] >= older_than:
            break
        await record_outcome(transaction, row, _never_arrived(row["seq"], missing_seq), transaction.clock.now())
        if row["kind"] in WINDOW_ENDING:
            broken_by = None
            await discard_window(transaction, session_id, row["seq"])
        applied_seq, broken_by = passed(refused, row["seq"], broken_by)
        failed.append(OperationId(row["id"]))
    if missing_seq is not None:
        await transaction.write(
            update(sessions)
            .where(sessions.c.id == session_id)
            .values(applied_seq=applied_seq, window_broken_by=broken_by)
        )
        transaction.announce()
    return failed


def _never_arrived(seq: int, missing_seq: int) -> Failure:
    return Failure(
        kind=Kind.CONFLICT,
        code="sequence_gap",
        message=f"operation {seq} waited for seq {missing_seq}, which never arrived",
        field="seq",
        details={"missing_seq": missing_seq},
    )


def _has_next_operation() -> ColumnElement[bool]:
    return exists(
        select(operations.c.id).where(
            and_(operations.c.session_id == sessions.c.id, operations.c.seq == sessions.c.applied_seq + 1)
        )
    )
