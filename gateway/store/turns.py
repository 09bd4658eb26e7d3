"""Whose turn it is on a trainer, by tokens: first between projects, then between the sessions of one.

Start-time fair queueing. Every turn of a project starts at a virtual time, the later of where its last turn ended and
where the newest turn of anybody started, and ends as many tokens later; whoever ended first is next. A project that was
away loses no place and saves none up: it waits for at most the operation that runs. The same between the sessions of a
project, so that a project with a hundred sessions has no more of the trainer than one with a single session.
"""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    ForeignKey,
    RowMapping,
    Table,
    Text,
    and_,
    func,
    select,
    update,
)

from gateway.store.tables import metadata, projects, sessions
from gateway.store.transaction import Transaction

UNBILLED_TOKENS = 64  # what an operation without tokens (a step, a save) counts for

turns = Table(
    "turns",
    metadata,
    Column("base_model", Text, primary_key=True, comment="Whose trainer"),
    Column("project_id", Text, ForeignKey(projects.c.id), primary_key=True, comment="Who takes turns"),
    Column("started", BigInteger, nullable=False, comment="Virtual time of its last turn, in tokens"),
    Column("finished", BigInteger, nullable=False, comment="The same, with that turn's tokens"),
    Column("session_started", BigInteger, nullable=False, comment="Of its sessions' last turn among them"),
)


def line() -> tuple[ColumnElement[Any], ...]:
    """Return what sessions are ordered by: whose project ended its last turn first, then which session did."""
    ended = (
        select(turns.c.finished)
        .where(and_(turns.c.base_model == sessions.c.base_model, turns.c.project_id == sessions.c.project_id))
        .scalar_subquery()
    )
    return (ended.asc().nulls_first(), sessions.c.turn.asc().nulls_first())


async def take_turn(transaction: Transaction, session: RowMapping, tokens: int | None) -> None:
    """Record that the locked ``session`` has its turn with an operation of ``tokens``."""
    cost = max(1, tokens or UNBILLED_TOKENS)
    base, project = session["base_model"], session["project_id"]
    row = {"base_model": base, "project_id": project, "started": 0, "finished": 0, "session_started": 0}
    await transaction.insert_new(turns, row)
    newest = await transaction.rows(select(func.max(turns.c.started).label("now")).where(turns.c.base_model == base))
    mine = and_(turns.c.base_model == base, turns.c.project_id == project)
    own = (await transaction.rows(select(turns).where(mine).with_for_update()))[0]
    started = max(own["finished"], newest[0]["now"])
    session_started = max(session["turn"] or 0, own["session_started"])
    await transaction.write(
        update(turns).where(mine).values(started=started, finished=started + cost, session_started=session_started)
    )
    await transaction.write(update(sessions).where(sessions.c.id == session["id"]).values(turn=session_started + cost))
