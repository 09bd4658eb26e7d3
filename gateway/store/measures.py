"""What an operator watches, read from the operation log: how much waits, how long things take, what recovers.

Each look counts what became final since the one before, so that a scrape costs what happened, not what there ever was.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, and_, func, select

from gateway.core.operations import Status
from gateway.store.tables import LIVE, operations, sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """What waits for one base model's trainer, and since when the oldest does."""

    base_model: str
    waiting: int
    oldest: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Live sessions of one base model, and how many of them are being rebuilt."""

    base_model: str
    sessions: int
    recovering: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """An operation that became final; seconds it waited and ran."""

    base_model: str
    kind: str
    status: str
    waited_s: float
    ran_s: float


def queues(connection: Connection) -> Sequence[Queue]:
    rows = connection.execute(
        select(sessions.c.base_model, func.count(), func.min(operations.c.created_at))
        .join(sessions, sessions.c.id == operations.c.session_id)
        .where(operations.c.status == Status.QUEUED)
        .group_by(sessions.c.base_model)
    )
    return [Queue(base_model=base, waiting=count, oldest=oldest) for base, count, oldest in rows]


def live(connection: Connection) -> Sequence[Live]:
    rows = connection.execute(
        select(sessions.c.base_model, sessions.c.recovering, func.count())
        .where(sessions.c.status.in_(LIVE))
        .group_by(sessions.c.base_model, sessions.c.recovering)
    )
    found: dict[str, Live] = {}
    for base, recovering, count in rows:
        known = found.get(base, Live(base_model=base, sessions=0, recovering=0))
        found[base] = Live(
            base_model=base,
            sessions=known.sessions + count,
            recovering=known.recovering + (count if recovering else 0),
        )
    return list(found.values())


def finished(connection: Connection, *, after: datetime, until: datetime) -> Sequence[Finished]:
    """Return the operations that became final in (after, until]."""
    rows = connection.execute(
        select(
            sessions.c.base_model,
            operations.c.kind,
            operations.c.status,
            operations.c.created_at,
            operations.c.started_at,
            operations.c.finished_at,
        )
        .join(sessions, sessions.c.id == operations.c.session_id)
        .where(and_(operations.c.finished_at > after, operations.c.finished_at <= until))
    )
    return [
        Finished(
            base_model=base,
            kind=kind,
            status=status,
            waited_s=((started or done) - created).total_seconds(),
            ran_s=0.0 if started is None else (done - started).total_seconds(),
        )
        for base, kind, status, created, started, done in rows
    ]
