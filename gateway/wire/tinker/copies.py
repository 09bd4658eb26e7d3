"""Copies of checkpoints: the same weights under a path of their own, in a run that cannot be trained on.

A copy is made as anybody would make one: a session loads the checkpoint, saves it, and stops. The client is answered
when the copy is there; until then it asks again under the same key, and goes on waiting for the same copy.
"""

from typing import Annotated

from fastapi import APIRouter, Header, Request

from gateway.core.bodies import Body
from gateway.core.catalog import Catalog
from gateway.core.clock import Clock
from gateway.core.errors import Conflict, Forbidden, Invalid, Unavailable
from gateway.core.ids import OperationId
from gateway.core.opening import new_session
from gateway.core.operations import Operation
from gateway.core.payloads import LoadState, Payload, Publish, SaveState, SaveWeights
from gateway.core.ports import UnitOfWork
from gateway.core.principals import Principal
from gateway.core.results import Failure, SaveResult
from gateway.core.scores import refusal_of
from gateway.core.sessions import OrderRule, Session
from gateway.core.versions import Labels, Version, VersionKind
from gateway.wire.deps import (
    MAX_IDEMPOTENCY_KEY,
    CatalogDep,
    ClockDep,
    DatabaseDep,
    FuturesDep,
    OperationFutures,
    TrainCaller,
    note_change,
)
from gateway.wire.idempotency import request_digest, reused
from gateway.wire.targets import find_version
from gateway.wire.tinker.checkpoints import path_of
from gateway.wire.tinker.futures import HOLD_S
from gateway.wire.tinker.listing_schemas import CopyAsked, CopyTold
from gateway.wire.tinker.routes import TinkerRoute
from gateway.wire.tinker.training import submitted
from gateway.wire.tinker.translate import check_ttl

COPY_TTL_S = 3600  # of the session that a copy takes, where nobody waits for its end

router = APIRouter(route_class=TinkerRoute)


@router.post("/copy_weights")
async def copy_weights(
    body: CopyAsked,
    request: Request,
    principal: TrainCaller,
    catalog: CatalogDep,
    clock: ClockDep,
    database: DatabaseDep,
    futures: FuturesDep,
    x_idempotency_key: Annotated[str | None, Header()] = None,
    x_tinker_weights_access_token: Annotated[str | None, Header()] = None,
) -> CopyTold:
    """Copy a checkpoint into the key's own project and say where the copy is."""
    _check(body, principal, x_idempotency_key, x_tinker_weights_access_token)
    labels = Labels(ttl_s=check_ttl(body.ttl_seconds))
    async with database.write() as unit:
        session, source = await _opened(unit, principal, catalog, clock, body, x_idempotency_key)
        optimizer = source.kind is VersionKind.STATE
        load = await submitted(
            unit, principal, session, Body.of(LoadState(version_id=source.id, optimizer=optimizer)), seq=1
        )
        await note_change(unit, request)
    await _finished(futures, load)
    async with database.write() as unit:
        save = await submitted(unit, principal, session, Body.of(_save(session, source, labels)), seq=2)
    result = (await _finished(futures, save)).outcome
    if not isinstance(result, SaveResult):
        raise TypeError(f"a save ended with {result!r}")
    async with database.write() as unit:
        await unit.sessions.stop(principal.project_id, session.id, clock.now())
        copy = await unit.versions.get(principal.project_id, result.version_id)
        return CopyTold(tinker_path=await path_of(unit, copy))


def _check(body: CopyAsked, principal: Principal, key: str | None, token: str | None) -> None:
    if body.destination_project_id != principal.project_id:
        raise Forbidden(
            "this key belongs to another project; copy with a key of the project that is to have the copy",
            code="wrong_project",
            field="destination_project_id",
        )
    if token is not None or body.weights_access_token is not None:
        raise Invalid(
            "weights_access_token is not offered here: checkpoints are read with the key of their own project",
            code="unsupported_field",
            field="weights_access_token",
        )
    if key is not None and not 1 <= len(key) <= MAX_IDEMPOTENCY_KEY:
        raise Invalid(f"X-Idempotency-Key must be 1 to {MAX_IDEMPOTENCY_KEY} characters", field="X-Idempotency-Key")


async def _opened(
    unit: UnitOfWork, principal: Principal, catalog: Catalog, clock: Clock, body: CopyAsked, key: str | None
) -> tuple[Session, Version]:
    """Return the session that makes the copy, the same for a request that comes again, and what is copied.

    Raises:
        NotFound: no such checkpoint, deleted, or expired.
        Conflict: the key was used for another request.
    """
    source = await find_version(unit, principal.project_id, body.source_path, field="source_path")
    asked = request_digest("tinker/copy_weights", body.model_dump_json().encode())
    known = None if key is None else await unit.sessions.by_idempotency_key(principal.project_id, key)
    if known is not None:
        if known[1] != asked:
            raise reused()
        return known[0], source
    source.require_present(clock.now(), field="source_path")
    session = new_session(
        project_id=principal.project_id,
        key_id=principal.key_id,
        model=catalog.get(source.base_model),
        lora=source.lora,
        order=OrderRule.STRICT,
        at=clock.now(),
        ttl_s=COPY_TTL_S,
        user_metadata={"copied_from": body.source_path},
    )
    await unit.sessions.add(session, idempotency_key=key, request_digest=asked)
    return session, source


def _save(session: Session, source: Version, labels: Labels) -> Payload:
    """Return the save that makes a copy of ``source``, under the same name."""
    kept = Labels(name=source.labels.name, user_metadata=source.labels.user_metadata, ttl_s=labels.ttl_s)
    if source.kind is VersionKind.STATE:
        return SaveState(group=session.group, labels=kept)
    return SaveWeights(group=session.group, publish=Publish.LAZY, labels=kept)


async def _finished(futures: OperationFutures, operation: Operation) -> Operation:
    """Wait for an operation's success.

    Raises:
        GatewayError: why it failed.
        Conflict: it was skipped.
        Unavailable: ``copy_pending``: it takes longer than the client waits for an answer.
    """
    ended = await futures.wait(operation.project_id, OperationId(operation.id), HOLD_S)
    if not ended.final:
        raise Unavailable("the copy is not finished; ask again", code="copy_pending")
    match ended.outcome:
        case Failure() as failure:
            raise refusal_of(failure)
        case None:
            raise Conflict("the session that was to make the copy has ended", code="operation_skipped")
        case _:
            return ended
