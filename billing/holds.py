"""Holds: money set aside before work, settled with what it did cost, or released.

A hold is opened in the transaction that admits the work and counts against every budget from then on. When the usage
is recorded it shrinks to the real cost, in the same transaction; the poster drops it with the posting. A hold of a
process that died is released when its heartbeat runs out, and remembered as a lost call: what an engine computed for
it nobody pays.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Text,
    and_,
    bindparam,
    column,
    delete,
    exists,
    select,
    table,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from billing.budgets import Warned, require_room
from billing.database import is_postgres
from billing.tables import holders, holds, inbox, lost_calls

OWNER_LIFE = 30_000_000  # microseconds without a heartbeat after which a process counts as dead
HEARTBEAT_S = 5.0

usage_source_operations = table(
    "usage_source_operations",
    *(column(name, Text) for name in ("source", "project_id", "key_id", "session_id", "base_model", "kind", "status")),
    column("tokens", BigInteger),
)
# Run with every call, so built once: building takes longer than running.
_OPEN = {
    postgres: (postgresql if postgres else sqlite).insert(holds).on_conflict_do_nothing() for postgres in (False, True)
}
_OF = holds.c.source == bindparam("of")
_SETTLE = update(holds).where(_OF).values(amount=bindparam("cost"), owner=None)
_RELEASE = delete(holds).where(_OF)
FINAL = ("completed", "failed", "skipped", "cancelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """``amount`` nano-USD for ``source``. ``owner`` is the process that works on it; None: an operation in the log."""

    source: str
    project_id: str
    key_id: str
    session_id: str | None
    base_model: str
    prompt_tokens: int
    sample_tokens: int
    amount: int
    owner: str | None
    at: int


_COLUMNS = [field.name for field in fields(Hold)]


def open_hold(connection: Connection, hold: Hold) -> list[Warned]:
    """Set money aside; opening the same hold again changes nothing. Returns the soft limits that are reached.

    Raises:
        OverBudget: nothing was set aside.
    """
    warned = require_room(
        connection,
        project_id=hold.project_id,
        key_id=hold.key_id,
        session_id=hold.session_id,
        amount=hold.amount,
        at=hold.at,
    )
    connection.execute(_OPEN[is_postgres(connection)], {name: getattr(hold, name) for name in _COLUMNS})
    return warned


def settle(connection: Connection, source: str, cost: int) -> None:
    """The work is done and its usage recorded in this transaction: hold what it did cost until it is posted."""
    connection.execute(_SETTLE, {"of": source, "cost": cost})


def release(connection: Connection, source: str) -> None:
    """The work did not happen."""
    connection.execute(_RELEASE, {"of": source})


def beat(connection: Connection, owner: str, *, at: int) -> None:
    """Say that ``owner`` lives."""
    insert = (postgresql if is_postgres(connection) else sqlite).insert(holders)
    row = {"owner": owner, "expires_at": at + OWNER_LIFE}
    connection.execute(
        insert.values(row).on_conflict_do_update(
            index_elements=[holders.c.owner], set_={"expires_at": row["expires_at"]}
        )
    )


def living(connection: Connection, *, at: int) -> Sequence[str]:
    """Return the processes that have said that they live."""
    return connection.execute(select(holders.c.owner).where(holders.c.expires_at > at)).scalars().all()


def leave(connection: Connection, owner: str) -> None:
    """``owner`` ends in order and has nothing open any more."""
    connection.execute(delete(holders).where(holders.c.owner == owner))


def lose(connection: Connection, source: str) -> None:
    """The work ended without a count: release what was held, and remember what an engine may have computed. What was
    settled before stays as it is."""
    _lose(connection, and_(holds.c.source == source, holds.c.owner.is_not(None)))


def release_dead(connection: Connection, *, at: int) -> Sequence[str]:
    """Lose the holds of processes whose heartbeat ran out; return their sources."""
    alive = select(holders.c.owner).where(holders.c.expires_at > at)
    lost = _lose(connection, and_(holds.c.owner.is_not(None), holds.c.owner.not_in(alive)))
    connection.execute(delete(holders).where(holders.c.expires_at <= at))
    return lost


def _lose(connection: Connection, which: ColumnElement[bool]) -> Sequence[str]:
    rows = connection.execute(delete(holds).where(which).returning(holds)).mappings().all()
    if rows:
        names = ("source", "base_model", "prompt_tokens", "sample_tokens", "at")
        insert = (postgresql if is_postgres(connection) else sqlite).insert(lost_calls)
        connection.execute(insert.on_conflict_do_nothing(), [{name: row[name] for name in names} for row in rows])
    return [row["source"] for row in rows]


def work_is_open(connection: Connection, base_model: str) -> bool:
    """Return whether a process says that an engine of ``base_model`` is working for it."""
    mine = and_(holds.c.base_model == base_model, holds.c.owner.is_not(None))
    return connection.execute(select(holds.c.source).where(mine).limit(1)).first() is not None


def ended() -> Any:
    """The holds of operations that ended and have nothing left to post."""
    o = usage_source_operations.c
    over = exists(select(o.source).where(and_(o.source == holds.c.source, o.status.in_(FINAL))))
    waiting = exists(select(inbox.c.source).where(inbox.c.source == holds.c.source))
    return and_(holds.c.owner.is_(None), over, ~waiting)


def release_ended(connection: Connection) -> int:
    """Release the holds of operations that ended without anything to pay; return how many."""
    return connection.execute(delete(holds).where(ended())).rowcount
