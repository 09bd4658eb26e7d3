"""Open a session, compute gradients, step."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends, Request

from gateway.core.bodies import Body
from gateway.core.catalog import BaseModel, Catalog
from gateway.core.clients import Seat
from gateway.core.clock import Clock
from gateway.core.custom_losses import CustomLoss
from gateway.core.errors import Conflict, Invalid
from gateway.core.opening import drawn_seed, new_session
from gateway.core.operations import Operation
from gateway.core.payloads import OptimStep, Payload
from gateway.core.ports import Database, UnitOfWork
from gateway.core.principals import Principal
from gateway.core.sessions import LoraConfig, OrderRule, Session
from gateway.core.submission import check_payload, submit
from gateway.wire.deps import CatalogDep, ClockDep, DatabaseDep, Reading, TrainCaller, Writing, note_change
from gateway.wire.idempotency import request_digest
from gateway.wire.tinker import protobuf
from gateway.wire.tinker.losses import read_stored
from gateway.wire.tinker.routes import ProtobufTurnRoute, TinkerRoute, TurnRoute
from gateway.wire.tinker.schemas import CreateModelAsked, Future, GetInfoAsked, InfoTold, ModelData, OptimStepAsked
from gateway.wire.tinker.translate import (
    ALPHA,
    CREATION_SEQ,
    SESSION_TTL_S,
    check_optimizer,
    check_seq,
    find_base_model,
    find_client,
    find_model,
    seq_of,
)
from gateway.wire.tokenizers import tokenizer_of

router = APIRouter(route_class=TinkerRoute)
turns = APIRouter(route_class=TurnRoute)
binary_turns = APIRouter(route_class=ProtobufTurnRoute)


@router.post("/create_model")
async def create_model(
    body: CreateModelAsked, principal: TrainCaller, catalog: CatalogDep, clock: ClockDep, unit: Writing
) -> Future:
    """Open a session with a fresh adapter. The same number of the same program names the same session."""
    check_optimizer(body.optimizer_config)
    lora = body.lora_config
    session = await open_model(
        unit,
        principal,
        clock,
        catalog,
        seat=(body.session_id, body.model_seq_id),
        base_model=body.base_model,
        lora=LoraConfig(
            rank=lora.rank,
            alpha=ALPHA,
            train_attn=lora.train_attn,
            train_mlp=lora.train_mlp,
            train_unembed=lora.train_unembed,
            seed=drawn_seed() if lora.seed is None else lora.seed,
        ),
        user_metadata=body.user_metadata or {},
        asked=request_digest("tinker/create_model", body.model_dump_json().encode()),
        applied_seq=CREATION_SEQ,
    )
    return Future(request_id=session.id, model_id=session.address)


async def open_model(
    unit: UnitOfWork,
    principal: Principal,
    clock: Clock,
    catalog: Catalog,
    *,
    seat: tuple[str, int],
    base_model: str,
    lora: LoraConfig,
    user_metadata: dict[str, str],
    asked: str,
    applied_seq: int,
) -> Session:
    """Open the session of a program's ``seat``, or return the one that the same request opened before.

    Raises:
        NotFound: no such program, no such base model.
        Conflict: the program has finished; another request has opened the session.
        Invalid: the LoRA configuration.
    """
    session_id, number = seat
    client = await find_client(unit, principal.project_id, session_id)
    place = Seat(client_id=client.id, number=number)
    known = await unit.sessions.by_seat(principal.project_id, place)
    if known is not None:
        session, digest = known
        if digest != asked:
            raise Conflict(
                f"{place.session_address} was opened by another request", code="sequence_reused", field="model_seq_id"
            )
        return session
    client.require_running()
    session = new_session(
        project_id=principal.project_id,
        key_id=principal.key_id,
        model=find_base_model(catalog, base_model),
        lora=lora,
        order=OrderRule.STRICT,
        at=clock.now(),
        ttl_s=SESSION_TTL_S,
        user_metadata=user_metadata,
        seat=place,
        applied_seq=applied_seq,
    )
    await unit.sessions.add(session, idempotency_key=None, request_digest=asked)
    return session


@router.post("/get_info")
async def get_info(
    body: GetInfoAsked, request: Request, principal: TrainCaller, catalog: CatalogDep, unit: Reading
) -> InfoTold:
    """Describe a session."""
    session = await find_model(unit, principal.project_id, body.model_id)
    model = catalog.get(session.base_model)
    return InfoTold(
        model_data=ModelData(arch=None, model_name=model.name, tokenizer_id=tokenizer_of(model, request)),
        model_id=session.address,
        lora_rank=session.lora.rank,
        model_name=model.name,
    )


async def _batch(
    request: Request, principal: TrainCaller, database: DatabaseDep, catalog: CatalogDep
) -> tuple[Session, Payload, int]:
    """Parse and check a batch before any unit of work is opened."""
    submitted = protobuf.parse(await request.body())
    async with database.read() as unit:
        session = await find_model(unit, principal.project_id, submitted.model_id)
        loss = None
        if submitted.loss_id is not None:
            loss = await read_stored(unit, principal.project_id, submitted.loss_id)
    payload = await asyncio.to_thread(_checked_batch, submitted, loss, catalog.get(session.base_model))
    return session, payload, seq_of(check_seq(submitted.seq_id))


def _checked_batch(submitted: protobuf.Submitted, loss: CustomLoss | None, model: BaseModel) -> Payload:
    payload = protobuf.payload_of(submitted, loss)
    check_payload(payload, model)
    return payload


@binary_turns.post("/forward_backward")
async def forward_backward(
    batch: Annotated[tuple[Session, Payload, int], Depends(_batch)], request: Request, database: DatabaseDep
) -> Future:
    """Queue a batch; with ``forward_only`` it touches no gradient."""
    return await _queue_whole(request, database, *batch)


@turns.post("/optim_step")
async def optim_step(
    body: OptimStepAsked, request: Request, principal: TrainCaller, catalog: CatalogDep, database: DatabaseDep
) -> Future:
    """Queue one optimizer step on the accumulated gradient."""
    check_optimizer(body.optimizer_params, field="optimizer_params")
    if body.adam_params is None:
        raise Invalid("adam_params is missing", field="adam_params")
    session = await database.ask(lambda unit: find_model(unit, principal.project_id, body.model_id))
    payload = OptimStep(**body.adam_params.model_dump())
    try:
        check_payload(payload, catalog.get(session.base_model))
    except Invalid as error:
        error.field = f"adam_params.{error.field}"
        raise
    return await _queue_whole(request, database, session, payload, seq_of(body.seq_id))


async def _queue_whole(request: Request, database: Database, session: Session, payload: Payload, seq: int) -> Future:
    """As ``queue``, in a unit of work of its own that is run in one go."""
    principal: Principal = request.state.principal
    body = await database.prepare(principal.project_id, payload)

    async def work(unit: UnitOfWork) -> Future:
        operation = await submitted(unit, principal, session, body, seq)
        await note_change(unit, request)
        return _future(session, operation)

    return await database.apply(work)


async def queue(unit: UnitOfWork, principal: Principal, session: Session, payload: Payload, seq: int) -> Future:
    """Submit a checked payload and say where its result will be."""
    return _future(session, await submitted(unit, principal, session, Body.of(payload), seq))


def _future(session: Session, operation: Operation) -> Future:
    return Future(request_id=operation.id, model_id=session.address)


async def submitted(unit: UnitOfWork, principal: Principal, session: Session, body: Body, seq: int) -> Operation:
    """Submit a checked payload as the session's number ``seq``."""
    return await submit(
        unit,
        project_id=principal.project_id,
        key_id=principal.key_id,
        session_id=session.id,
        body=body,
        seq=seq,
    )
