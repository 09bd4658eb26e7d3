"""What a program asks first, and how it says that it lives and that it ended."""

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from gateway.core.clients import Client, Finish
from gateway.core.errors import Forbidden
from gateway.core.ids import new_client_id
from gateway.core.validation import MAX_DATUMS
from gateway.wire.deps import Caller, CatalogDep, ClockDep, Touching, WorkCaller, Writing
from gateway.wire.tinker.routes import TinkerRoute
from gateway.wire.tinker.schemas import (
    Capabilities,
    ClientConfig,
    ClientConfigAsked,
    Document,
    DynamicConfig,
    FinishAsked,
    HeartbeatAsked,
    HeartbeatTold,
    SessionAsked,
    SessionTold,
    SupportedModel,
)
from gateway.wire.tinker.translate import find_client

router = APIRouter(route_class=TinkerRoute)


@router.post("/client/config")
async def client_config(body: ClientConfigAsked, principal: Caller) -> ClientConfig:
    """Say what the SDK may rely on."""
    return ClientConfig(fwdbwd_max_chunk_len=MAX_DATUMS)


@router.post("/client/dynamic_config")
async def dynamic_config(body: ClientConfigAsked, principal: Caller) -> DynamicConfig:
    """Say what the SDK asks for again now and then."""
    return DynamicConfig()


@router.post("/create_session")
async def create_session(body: SessionAsked, principal: WorkCaller, clock: ClockDep, unit: Writing) -> SessionTold:
    """Record a program. A project named in the request must be the key's own."""
    if body.project_id not in (None, principal.project_id):
        raise Forbidden("this key belongs to another project", code="wrong_project", field="project_id")
    now = clock.now()
    client = Client(
        id=new_client_id(),
        project_id=principal.project_id,
        key_id=principal.key_id,
        name=body.display_name,
        tags=body.tags,
        user_metadata=body.user_metadata or {},
        created_at=now,
        seen_at=now,
        finished_at=None,
        finish=None,
        detail=None,
    )
    await unit.clients.add(client)
    return SessionTold(session_id=client.id)


@router.post("/session_heartbeat", response_model=None)
async def heartbeat(
    body: HeartbeatAsked, principal: WorkCaller, clock: ClockDep, unit: Touching
) -> HeartbeatTold | Response:
    """Keep a program's sessions from expiring; 410 tells a finished one to stop asking."""
    client = await find_client(unit, principal.project_id, body.session_id)
    if client.finished_at is not None:
        return JSONResponse({"error": "this session has finished", "category": "user"}, status_code=410)
    await unit.clients.seen(principal.project_id, client.id, clock.now())
    return HeartbeatTold()


@router.post("/sessions/{session_id}/finish", status_code=204, response_class=Response)
async def finish_session(
    session_id: str, body: FinishAsked, principal: WorkCaller, clock: ClockDep, unit: Writing
) -> None:
    """Record a program's end and stop its sessions: what is queued is skipped, what was saved stays."""
    now = clock.now()
    client = await find_client(unit, principal.project_id, session_id)
    live = await unit.clients.finish(principal.project_id, client.id, Finish(body.reason.type), body.detail, now)
    for session in live:
        await unit.sessions.stop(principal.project_id, session, now)


@router.post("/telemetry")
async def telemetry(body: Document, principal: Caller) -> Document:
    """Take the SDK's reports about itself, and keep none."""
    return {"status": "accepted"}


@router.get("/healthz")
async def healthz(principal: Caller) -> Document:
    """Say that the gateway answers."""
    return {"status": "ok"}


@router.get("/get_server_capabilities")
async def capabilities(principal: Caller, catalog: CatalogDep) -> Capabilities:
    """List the base models of the catalogue. Those without an engine can be trained, not sampled."""
    return Capabilities(
        supported_models=[
            SupportedModel(
                model_name=model.name,
                max_context_length=model.context_length,
                trainable=True,
                sampleable=bool(model.engines),
            )
            for _, model in sorted(catalog.models.items())
        ]
    )
