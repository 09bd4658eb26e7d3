"""Turns: a request that names a model and its ``seq_id`` has had its turn, also when it is refused for good.

The client never repeats a refused turn; it goes on with the next. So the seq of a refused request is recorded as
consumed, after whatever the request wrote was rolled back.
"""

from dataclasses import dataclass
from typing import Any, cast

from fastapi import Request
from fastapi.exceptions import RequestValidationError

from gateway.core.errors import GatewayError, Kind, NotFound
from gateway.core.operations import MAX_SEQ
from gateway.core.payloads import OperationKind
from gateway.core.ports import Database
from gateway.core.principals import Principal
from gateway.wire.tinker.translate import find_model, seq_of

_PERMANENT = frozenset({Kind.INVALID, Kind.NOT_FOUND, Kind.CONFLICT})  # a key without the right changes nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a refused request says of its place."""

    model_id: str
    seq_id: int
    kind: OperationKind


def turn_of(body: Any, kind: OperationKind) -> Turn | None:
    """Read the turn out of a JSON body that may be anything."""
    fields = cast("dict[str, Any]", body) if isinstance(body, dict) else {}
    model_id, seq_id = fields.get("model_id"), fields.get("seq_id")
    if not isinstance(model_id, str) or not isinstance(seq_id, int) or isinstance(seq_id, bool):
        return None
    return Turn(model_id=model_id, seq_id=seq_id, kind=kind)


async def consume(request: Request, error: Exception) -> None:
    """Record the turn that ``request`` was noted to hold, if ``error`` refuses it for good."""
    turn: Turn | None = getattr(request.state, "turn", None)
    permanent = isinstance(error, RequestValidationError) or (
        isinstance(error, GatewayError) and error.kind in _PERMANENT
    )
    if turn is None or not permanent or not 1 <= turn.seq_id < MAX_SEQ:
        return
    database: Database = request.state.database
    principal: Principal = request.state.principal
    async with database.write() as unit:
        try:
            session = await find_model(unit, principal.project_id, turn.model_id)
        except NotFound:
            return
        await unit.operations.refuse(session, principal.key_id, seq_of(turn.seq_id), turn.kind)
