"""Save weights and states, and load them again, also into a session of their own."""

from fastapi import APIRouter

from gateway.core.addresses import name_in
from gateway.core.catalog import Catalog
from gateway.core.clients import Sampler, Seat, parse_session_address
from gateway.core.clock import Clock
from gateway.core.errors import Conflict, Invalid
from gateway.core.ids import OperationId
from gateway.core.payloads import LoadState, Publish, SaveState, SaveWeights
from gateway.core.ports import UnitOfWork
from gateway.core.principals import Principal
from gateway.core.sessions import Session
from gateway.core.submission import check_payload
from gateway.core.versions import Labels, VersionKind
from gateway.wire.deps import CatalogDep, ClockDep, TrainCaller, Writing
from gateway.wire.idempotency import request_digest
from gateway.wire.tinker.checkpoints import find_checkpoint
from gateway.wire.tinker.routes import TurnRoute
from gateway.wire.tinker.schemas import Future, LoadWeightsAsked, SaveExternalAsked, SaveSamplerAsked, SaveWeightsAsked
from gateway.wire.tinker.training import open_model, queue
from gateway.wire.tinker.translate import (
    CREATION_SEQ,
    check_optimizer,
    check_ttl,
    find_base_model,
    find_client,
    find_model,
    seq_of,
)

UNNAMED_TTL_S = 7 * 24 * 3600  # of saves that only a sampler uses

turns = APIRouter(route_class=TurnRoute)


@turns.post("/load_weights")
async def load_weights(
    body: LoadWeightsAsked, principal: TrainCaller, catalog: CatalogDep, clock: ClockDep, unit: Writing
) -> Future:
    """Load a checkpoint into a model, or (by program and number) open one with it."""
    check_optimizer(body.optimizer_config)
    if body.weights_access_token is not None:
        raise Invalid(
            "weights_access_token is not offered here: checkpoints are read with the key of their own project",
            code="unsupported_field",
            field="weights_access_token",
        )
    if body.session_id is not None and body.model_seq_id is not None and body.model_id is None:
        return await _open_with(unit, principal, clock, catalog, body, (body.session_id, body.model_seq_id))
    if body.model_id is None or body.seq_id is None or body.session_id is not None:
        raise Invalid("give model_id and seq_id, or session_id and model_seq_id", field="model_id")
    session = await find_model(unit, principal.project_id, body.model_id)
    version = await find_checkpoint(unit, principal.project_id, body.path, at=clock.now(), sampling=False)
    payload = LoadState(version_id=version.id, optimizer=body.optimizer)
    return await queue(unit, principal, session, payload, seq_of(body.seq_id))


async def _open_with(
    unit: UnitOfWork,
    principal: Principal,
    clock: Clock,
    catalog: Catalog,
    body: LoadWeightsAsked,
    seat: tuple[str, int],
) -> Future:
    """The load is the new model's creation; rank and layers are the checkpoint's."""
    version = await find_checkpoint(unit, principal.project_id, body.path, at=clock.now(), sampling=False)
    base = version.base_model
    if body.base_model is not None and find_base_model(catalog, body.base_model).name != base:
        raise Invalid(
            f"the checkpoint was trained on {base}, not on the base_model given",
            code="base_model_mismatch",
            field="base_model",
        )
    session = await open_model(
        unit,
        principal,
        clock,
        catalog,
        seat=seat,
        base_model=base,
        lora=version.lora,
        user_metadata=body.user_metadata or {},
        asked=request_digest("tinker/load_weights", body.model_dump_json().encode()),
        applied_seq=CREATION_SEQ - 1,
    )
    payload = LoadState(version_id=version.id, optimizer=body.optimizer)
    return await queue(unit, principal, session, payload, CREATION_SEQ)


@turns.post("/save_weights")
async def save_weights(
    body: SaveWeightsAsked, principal: TrainCaller, catalog: CatalogDep, clock: ClockDep, unit: Writing
) -> Future:
    """Save weights, moments and counters, to go on from."""
    session = await find_model(unit, principal.project_id, body.model_id)
    labels = _labels("weights", body.path, body.ttl_seconds, body.user_metadata)
    payload = SaveState(group=session.group, labels=labels)
    check_payload(payload, catalog.get(session.base_model))
    seq = seq_of(body.seq_id)
    if body.overwrite and labels.name is not None and await unit.operations.by_seq(session.id, seq) is None:
        before = await unit.versions.by_name(session.id, VersionKind.STATE, labels.name)
        if before is not None:
            await unit.registry.replace(principal.project_id, before.id, by=principal.key_id, at=clock.now())
    return await queue(unit, principal, session, payload, seq)


@turns.post("/save_weights_for_sampler")
async def save_weights_for_sampler(
    body: SaveSamplerAsked, principal: TrainCaller, catalog: CatalogDep, clock: ClockDep, unit: Writing
) -> Future:
    """Save an adapter under a name, served at its first use; or for a sampler, served when the save completes."""
    session = await find_model(unit, principal.project_id, body.model_id)
    if (body.path is None) is (body.sampling_session_seq_id is None):
        raise Invalid("give either path or sampling_session_seq_id", field="path")
    if body.path is not None:
        if body.kind != "snapshot":
            raise Invalid("a named checkpoint is a snapshot; leave kind out", field="kind")
        labels = _labels("sampler_weights", body.path, body.ttl_seconds, body.user_metadata)
        payload = SaveWeights(group=session.group, publish=Publish.LAZY, labels=labels)
    else:
        ttl_s = check_ttl(body.ttl_seconds) or UNNAMED_TTL_S
        payload = SaveWeights(group=session.group, labels=Labels(user_metadata=body.user_metadata or {}, ttl_s=ttl_s))
    check_payload(payload, catalog.get(session.base_model))
    future = await queue(unit, principal, session, payload, seq_of(body.seq_id))
    if body.sampling_session_seq_id is not None:
        await _add_sampler(unit, session, OperationId(future.request_id), body, clock)
    return future


async def _add_sampler(
    unit: UnitOfWork, session: Session, operation_id: OperationId, body: SaveSamplerAsked, clock: Clock
) -> None:
    """Make the handle that the save's result names. It is the program's that opened the model."""
    model = parse_session_address(session.address)
    if model is None or body.sampling_session_seq_id is None:
        raise Invalid("only a model that a program opened has samplers; save under a name", field="path")
    await find_client(unit, session.project_id, model.client_id)
    seat = Seat(client_id=model.client_id, number=body.sampling_session_seq_id)
    sampler = await unit.clients.add_sampler(
        Sampler(
            seat=seat,
            project_id=session.project_id,
            base_model=session.base_model,
            version_id=None,
            operation_id=operation_id,
            session_id=session.id if body.kind == "inflight" else None,
            copies=0,
            created_at=clock.now(),
        )
    )
    if sampler.operation_id != operation_id:
        raise Conflict(f"{seat.sampler_address} was opened by another request", code="sequence_reused")


@turns.post("/save_weights_external")
async def save_weights_external(
    body: SaveExternalAsked, principal: TrainCaller, catalog: CatalogDep, unit: Writing
) -> Future:
    """Save an adapter to download as a PEFT directory."""
    if body.age_encryption_recipients:
        raise Invalid(
            "age_encryption_recipients is not offered here; encrypt the files after the download",
            code="unsupported_field",
            field="age_encryption_recipients",
        )
    session = await find_model(unit, principal.project_id, body.model_id)
    labels = _labels("external_weights", body.path, body.ttl_seconds, None)
    payload = SaveWeights(group=session.group, publish=Publish.LAZY, labels=labels)
    check_payload(payload, catalog.get(session.base_model))
    return await queue(unit, principal, session, payload, seq_of(body.seq_id))


def _labels(space: str, name: str | None, ttl_s: int | None, user_metadata: dict[str, str] | None) -> Labels:
    return Labels(
        name=None if name is None else name_in(space, name, field="path"),
        user_metadata=user_metadata or {},
        ttl_s=check_ttl(ttl_s),
    )
