"""Refused operations: they hold their seq, so that they block nobody, and leave no trace in weights and moments.

A refused forward_backward leaves a hole in the gradient all the same: the window counts as incomplete once its seq is
passed, exactly as when the trainer had failed it.
"""

from collections.abc import Mapping

from sqlalchemy import RowMapping, and_, select, update

from gateway.core.ids import KeyId, SessionId, new_operation_id
from gateway.core.operations import Status
from gateway.core.payloads import OperationKind
from gateway.core.sessions import OrderRule
from gateway.store.sessions import ACCEPTING, lock_session
from gateway.store.tables import operations, sessions
from gateway.store.transaction import Transaction

_NOTHING = "0" * 64  # the digest of a body that was not kept


async def refuse(transaction: Transaction, session_id: SessionId, key_id: KeyId, seq: int, kind: OperationKind) -> None:
    """Record that ``seq`` was refused. One that is taken or passed already, or of a session that ended, stays."""
    session = await lock_session(transaction, session_id)
    if seq <= session["applied_seq"] or session["status"] not in ACCEPTING:
        return
    now = transaction.clock.now()
    row = {
        "id": new_operation_id(),
        "session_id": session_id,
        "project_id": session["project_id"],
        "key_id": key_id,
        "seq": seq,
        "kind": kind.value,
        "status": Status.CANCELLED.value,
        "staged": False,
        "payload_digest": _NOTHING,
        "attempts": 0,
        "created_at": now,
        "finished_at": now,
        "window_discarded": False,
    }
    if not await transaction.insert_new(operations, row) or session["order_rule"] != OrderRule.STRICT:
        return
    applied_seq, broken_by = passed(
        await refused_after(transaction, session), session["applied_seq"], session["window_broken_by"]
    )
    await transaction.write(
        update(sessions).where(sessions.c.id == session_id).values(applied_seq=applied_seq, window_broken_by=broken_by)
    )
    transaction.announce()


async def refused_after(transaction: Transaction, session: RowMapping) -> Mapping[int, OperationKind]:
    """Return the kinds of a session's refused operations that it has not passed yet, by seq."""
    rows = await transaction.rows(
        select(operations.c.seq, operations.c.kind).where(
            and_(
                operations.c.session_id == session["id"],
                operations.c.seq > session["applied_seq"],
                operations.c.status == Status.CANCELLED,
            )
        )
    )
    return {row["seq"]: OperationKind(row["kind"]) for row in rows}


def passed(refused: Mapping[int, OperationKind], applied_seq: int, broken_by: int | None) -> tuple[int, int | None]:
    """Return ``applied_seq`` and ``window_broken_by`` after the refused operations that come next."""
    while (kind := refused.get(applied_seq + 1)) is not None:
        applied_seq += 1
        if kind is OperationKind.FORWARD_BACKWARD:
            broken_by = broken_by or applied_seq
    return applied_seq, broken_by


def skipped(refused: Mapping[int, OperationKind], seq: int, broken_by: int | None) -> int | None:
    """Return ``window_broken_by`` when operation ``seq`` comes next although refused ones before it were not passed:
    in an ascending session a number that was never sent can stand between them."""
    holes = [at for at, kind in refused.items() if at < seq and kind is OperationKind.FORWARD_BACKWARD]
    return broken_by or min(holes, default=None)
