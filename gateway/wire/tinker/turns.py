"""Which turn of which model a request of this dialect takes."""

from functools import partial
from typing import Any, cast

from gateway.core.ids import ProjectId
from gateway.core.payloads import OperationKind
from gateway.core.ports import UnitOfWork
from gateway.core.sessions import Session
from gateway.wire.tinker.translate import find_model, seq_of
from gateway.wire.turns import Turn


def turn_of(body: Any, kind: OperationKind) -> Turn | None:
    """Read the turn out of a JSON body that may be anything."""
    fields = cast("dict[str, Any]", body) if isinstance(body, dict) else {}
    model_id, seq_id = fields.get("model_id"), fields.get("seq_id")
    if not isinstance(model_id, str) or not isinstance(seq_id, int) or isinstance(seq_id, bool):
        return None
    return turn(model_id, seq_id, kind)


def turn(model_id: str, seq_id: int, kind: OperationKind) -> Turn | None:
    """Return the turn of a model; None: the number is none that a client gives a request."""
    return Turn(find=partial(_find, model_id=model_id), seq=seq_of(seq_id), kind=kind) if seq_id >= 1 else None


async def _find(unit: UnitOfWork, project_id: ProjectId, *, model_id: str) -> Session:
    return await find_model(unit, project_id, model_id)
