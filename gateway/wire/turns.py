"""Turns: a request that names a session and its seq has had its turn, also when it is refused for good.

A client that never repeats a refused request, but goes on with the next, needs this: the seq of a refused request is
recorded as consumed, after whatever the request wrote was rolled back. A refused forward_backward leaves the gradient
window incomplete.
"""

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from fastapi import Request
from fastapi.exceptions import RequestValidationError

from gateway.core.errors import GatewayError, Kind, NotFound
from gateway.core.ids import ProjectId
from gateway.core.operations import MAX_SEQ
from gateway.core.payloads import OperationKind
from gateway.core.ports import Database, UnitOfWork
from gateway.core.principals import Principal
from gateway.core.sessions import Session

PERMANENT = frozenset({Kind.INVALID, Kind.NOT_FOUND, Kind.CONFLICT})  # a key without the right changes nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a refused request says of its place: ``seq`` of the session that ``find`` returns, or raises NotFound."""

    find: Callable[[UnitOfWork, ProjectId], Awaitable[Session]]
    seq: int
    kind: OperationKind


def note(request: Request, turn: Turn | None) -> None:
    """Keep a refused request's turn until the refusal is answered."""
    request.state.turn = turn


async def consume(request: Request, error: Exception, *, permanent: Collection[Kind] = PERMANENT) -> None:
    """Record the turn that ``request`` was noted to hold, if ``error`` refuses it for good, by its kind."""
    turn: Turn | None = getattr(request.state, "turn", None)
    final = isinstance(error, RequestValidationError) or (isinstance(error, GatewayError) and error.kind in permanent)
    if turn is None or not final or not 1 <= turn.seq <= MAX_SEQ:
        return
    database: Database = request.state.database
    principal: Principal = request.state.principal
    async with database.write() as unit:
        try:
            session = await turn.find(unit, principal.project_id)
        except NotFound:
            return
        await unit.operations.refuse(session, principal.key_id, turn.seq, turn.kind)
