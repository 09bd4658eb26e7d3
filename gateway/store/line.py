"""Where queued operations stand in their session's line."""

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import and_, bindparam, func, select

from gateway.core.ids import SessionId
from gateway.core.operations import Status
from gateway.core.sessions import OrderRule
from gateway.store.sessions import OPEN
from gateway.store.tables import operations
from gateway.store.transaction import Transaction

_PRESENT = (*OPEN, Status.CANCELLED)  # a refused operation holds its seq until it is passed


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a queued operation stands: how many come before it, and the lowest missing seq that holds it back."""

    position: int
    missing_seq: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A session's operations that are not applied yet, in order."""

    order: OrderRule
    applied_seq: int
    waiting: Sequence[int]  # seqs above applied_seq, ascending

    def place(self, seq: int) -> Place:
        position = bisect_left(self.waiting, seq)
        if self.order is OrderRule.ASCENDING or position == seq - self.applied_seq - 1:
            return Place(position=position, missing_seq=None)
        expected = itertools.count(self.applied_seq + 1)
        present = itertools.chain(self.waiting[:position], [seq])
        return Place(position=position, missing_seq=next(e for e, p in zip(expected, present) if e != p))  # noqa: B905


async def place_of(
    transaction: Transaction, session_id: SessionId, order_rule: str, applied_seq: int, seq: int
) -> Place:
    rows = await transaction.rows(
        _BEFORE, {"session": session_id, "applied": applied_seq, "below": seq, "present": _PRESENT}
    )
    position: int = rows[0]["before"]
    if order_rule == OrderRule.ASCENDING or position == seq - applied_seq - 1:
        return Place(position=position, missing_seq=None)
    return (await line_of(transaction, session_id, order_rule, applied_seq, seq)).place(seq)


_BEFORE = select(func.count().label("before")).where(
    and_(
        operations.c.session_id == bindparam("session"),
        operations.c.status.in_(bindparam("present", expanding=True)),
        operations.c.seq > bindparam("applied"),
        operations.c.seq < bindparam("below"),
    )
)
"""Asked with every operation, so built once."""


async def line_of(transaction: Transaction, session_id: SessionId, order_rule: str, applied_seq: int, seq: int) -> Line:
    """Return the line up to operation ``seq``."""
    rows = await transaction.rows(
        select(operations.c.seq)
        .where(
            and_(
                operations.c.session_id == session_id,
                operations.c.status.in_(_PRESENT),
                operations.c.seq > applied_seq,
                operations.c.seq <= seq,
            )
        )
        .order_by(operations.c.seq)
    )
    return Line(order=OrderRule(order_rule), applied_seq=applied_seq, waiting=[row["seq"] for row in rows])
