"""Open, inspect and stop training sessions."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query

from gateway.core.catalog import Catalog
from gateway.core.errors import Invalid
from gateway.core.ids import SessionId
from gateway.core.opening import drawn_seed, new_session
from gateway.core.sessions import LoraConfig, OrderRule, Session
from gateway.core.versions import check_group_name
from gateway.wire.deps import (
    Caller,
    CatalogDep,
    ClockDep,
    DatabaseDep,
    IdempotencyKey,
    Reading,
    TrainCaller,
    Writing,
)
from gateway.wire.idempotency import request_digest, reused
from gateway.wire.native.render import session_read, sessions_read
from gateway.wire.native.schemas.base import PageQuery
from gateway.wire.native.schemas.sessions import LoraCreate, SessionCreate, SessionPage, SessionRead
from gateway.wire.routes import DialectRoute
from gateway.wire.targets import SESSION_PREFIX, find_session

router = APIRouter(route_class=DialectRoute, tags=["sessions"])


async def _own_session(session_id: str, principal: Caller, database: DatabaseDep) -> Session:
    async with database.read() as unit:
        return await find_session(unit, principal.project_id, session_id)


OwnSession = Annotated[Session, Depends(_own_session)]
"""The caller's session that the path names by id or name, as it was when the request came in."""


@router.post("/sessions", status_code=201)
async def create_session(
    body: SessionCreate,
    principal: TrainCaller,
    catalog: CatalogDep,
    clock: ClockDep,
    idempotency_key: IdempotencyKey,
    unit: Writing,
) -> SessionRead:
    """Open a session. The same Idempotency-Key with the same body returns the session it opened."""
    asked = request_digest("sessions", body.model_dump_json().encode())
    if idempotency_key is not None:
        known = await unit.sessions.by_idempotency_key(principal.project_id, idempotency_key)
        if known is not None:
            session, digest = known
            if digest != asked:
                raise reused()
            return await session_read(unit, session)
    model = catalog.get(body.base_model)
    session = new_session(
        project_id=principal.project_id,
        key_id=principal.key_id,
        model=model,
        lora=_lora(body.lora),
        order=OrderRule.STRICT,
        at=clock.now(),
        name=_checked_name(body.name, catalog),
        group=None if body.model_package_group is None else check_group_name(body.model_package_group),
        ttl_s=body.ttl_seconds,
        user_metadata=body.user_metadata,
    )
    await unit.sessions.add(session, idempotency_key=idempotency_key, request_digest=asked)
    return await session_read(unit, session)


def _checked_name(name: str | None, catalog: Catalog) -> str | None:
    """Return ``name``, which must not read as a session id or as a base model: both come first where one is named."""
    if name is not None and (name.startswith(SESSION_PREFIX) or name in catalog.models):
        raise Invalid(f"name must not start with {SESSION_PREFIX!r} or be the name of a base model", field="name")
    return name


def _lora(lora: LoraCreate) -> LoraConfig:
    return LoraConfig(
        rank=lora.rank,
        alpha=lora.alpha,
        train_attn=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
        seed=drawn_seed() if lora.seed is None else lora.seed,
        use_rslora=lora.use_rslora,
    )


@router.get("/sessions")
async def list_sessions(query: Annotated[PageQuery, Query()], principal: Caller, unit: Reading) -> SessionPage:
    """List the project's sessions, newest first."""
    after = None if query.after is None else SessionId(query.after)
    sessions = await unit.sessions.page(principal.project_id, limit=query.limit, after=after)
    return SessionPage(
        data=await sessions_read(unit, sessions),
        next=sessions[-1].id if len(sessions) == query.limit else None,
    )


@router.get("/sessions/{session_id}")
async def read_session(session_id: str, principal: Caller, unit: Reading) -> SessionRead:
    """Read one session, by id or name."""
    return await session_read(unit, await find_session(unit, principal.project_id, session_id))


@router.delete("/sessions/{session_id}")
async def stop_session(session_id: str, principal: TrainCaller, clock: ClockDep, unit: Writing) -> SessionRead:
    """Stop a session: what is queued is skipped, what runs finishes. Stopping twice is fine."""
    session = await find_session(unit, principal.project_id, session_id)
    return await session_read(unit, await unit.sessions.stop(principal.project_id, session.id, clock.now()))
