"""Programs and the models they trained, listed. Sessions that other dialects opened are training runs too."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from gateway.core.errors import Forbidden, Invalid
from gateway.core.ports import UnitOfWork
from gateway.core.sessions import Session, SessionStatus
from gateway.core.versions import VersionFilter, VersionKind
from gateway.wire.deps import Caller, Reading, WorkCaller
from gateway.wire.tinker.checkpoints import checkpoint_read
from gateway.wire.tinker.listing_schemas import (
    CheckpointRead,
    Cursor,
    PageQuery,
    ProjectAsked,
    SessionList,
    SessionRead,
    TrainingRunPage,
    TrainingRunRead,
)
from gateway.wire.tinker.routes import TinkerRoute
from gateway.wire.tinker.schemas import Document
from gateway.wire.tinker.translate import find_client, find_model

router = APIRouter(route_class=TinkerRoute)


@router.get("/training_runs")
async def list_runs(query: Annotated[PageQuery, Query()], principal: Caller, unit: Reading) -> TrainingRunPage:
    """List the project's models, newest first."""
    project_id = principal.project_id
    sessions = await unit.sessions.page(project_id, limit=query.limit, after=None, offset=query.offset)
    return TrainingRunPage(
        training_runs=[await _run(unit, session) for session in sessions],
        cursor=Cursor(offset=query.offset, limit=query.limit, total_count=await unit.sessions.count(project_id)),
    )


@router.get("/training_runs/{run_id}")
async def read_run(run_id: str, principal: Caller, unit: Reading) -> TrainingRunRead:
    """Describe one model."""
    return await _run(unit, await find_model(unit, principal.project_id, run_id))


async def _run(unit: UnitOfWork, session: Session) -> TrainingRunRead:
    return TrainingRunRead(
        training_run_id=session.address,
        base_model=session.base_model,
        model_owner=session.key_id,
        corrupted=session.status is SessionStatus.FAILED,
        lora_rank=session.lora.rank,
        last_request_time=session.last_used_at,
        last_checkpoint=await _newest(unit, session, VersionKind.STATE),
        last_sampler_checkpoint=await _newest(unit, session, VersionKind.ADAPTER),
        user_metadata=dict(session.user_metadata),
    )


async def _newest(unit: UnitOfWork, session: Session, kind: VersionKind) -> CheckpointRead | None:
    wanted = VersionFilter(named=True, session_id=session.id, kind=kind)
    newest = await unit.versions.page(session.project_id, wanted, limit=1, after=None)
    return checkpoint_read(newest[0], session) if newest else None


@router.get("/sessions")
async def list_sessions(query: Annotated[PageQuery, Query()], principal: Caller, unit: Reading) -> SessionList:
    """List the project's programs, newest first."""
    clients = await unit.clients.page(principal.project_id, limit=query.limit, offset=query.offset)
    return SessionList(sessions=[client.id for client in clients])


@router.get("/sessions/{session_id}")
async def read_session(session_id: str, principal: Caller, unit: Reading) -> SessionRead:
    """Say what a program opened."""
    client = await find_client(unit, principal.project_id, session_id)
    return SessionRead(
        training_run_ids=[s.address for s in await unit.sessions.of_client(principal.project_id, client.id)],
        sampler_ids=[s.seat.sampler_address for s in await unit.clients.samplers(principal.project_id, client.id)],
        user_metadata=dict(client.user_metadata),
        display_name=client.name,
    )


@router.put("/sessions/{session_id}/project", status_code=204, response_class=Response)
async def move_session(session_id: str, body: ProjectAsked, principal: WorkCaller, unit: Reading) -> None:
    """A program belongs to its key's project, and stays there."""
    client = await find_client(unit, principal.project_id, session_id)
    if body.project_id != client.project_id:
        raise Forbidden("a session stays in the project of its key", code="wrong_project", field="project_id")


@router.get("/sessions/{session_id}/trace_export")
async def trace_export(session_id: str, principal: Caller, unit: Reading) -> Document:
    """No traces are kept; the answer is one that the SDK does not ask for again."""
    await find_client(unit, principal.project_id, session_id)
    return {"status": "failed", "url": None, "error": "this server keeps no traces"}


@router.post("/sessions/search")
@router.get("/audit")
async def not_offered(principal: Caller) -> None:
    """What this server has no answer to."""
    raise Invalid("this route is not offered here", code="unsupported_route")
