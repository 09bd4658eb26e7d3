"""Submit training operations, inspect them, wait for them."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response

from gateway.core.catalog import Catalog
from gateway.core.errors import Invalid
from gateway.core.ids import OperationId
from gateway.core.operations import Operation, Status
from gateway.core.payloads import (
    Forward,
    ForwardBackward,
    LoadState,
    LossFn,
    OperationKind,
    OptimStep,
    Payload,
    Publish,
    SaveState,
    SaveWeights,
)
from gateway.core.ports import Database, Prices, UnitOfWork
from gateway.core.principals import Principal
from gateway.core.sessions import Session
from gateway.core.submission import check_payload, submit
from gateway.core.versions import VersionKind
from gateway.wire.deps import (
    Caller,
    CatalogDep,
    DatabaseDep,
    FuturesDep,
    IdempotencyKey,
    PricesDep,
    Reading,
    TrainCaller,
    note_change,
)
from gateway.wire.metering import cost_headers, warning_headers
from gateway.wire.native.payloads import Batch, parse_batch
from gateway.wire.native.render import operation_read
from gateway.wire.native.schemas.operations import (
    LoadStateCreate,
    OperationPage,
    OperationRead,
    OperationsQuery,
    OptimStepCreate,
    SaveStateCreate,
    SaveWeightsCreate,
    WaitQuery,
)
from gateway.wire.native.sessions import OwnSession
from gateway.wire.routes import DialectRoute
from gateway.wire.targets import find_session, find_version

router = APIRouter(route_class=DialectRoute, tags=["operations"])

_METERED = frozenset({OperationKind.FORWARD, OperationKind.FORWARD_BACKWARD})

_BATCH_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["data"],
                    "properties": {
                        "seq": {"type": "integer", "nullable": True},
                        "data": {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "required": ["model_input", "loss_fn_inputs"],
                                "properties": {
                                    "model_input": {"description": 'Token ids, or {"chunks": [{"tokens": [ids]}]}'},
                                    "loss_fn_inputs": {
                                        "type": "object",
                                        "description": 'Name to numbers, or to {"dtype", "shape", "data"}',
                                    },
                                },
                            },
                        },
                        "loss_fn": {
                            "type": "string",
                            "enum": [loss_fn.value for loss_fn in LossFn],
                            "default": "cross_entropy",
                        },
                        "loss_fn_config": {"type": "object", "additionalProperties": {"type": "number"}},
                    },
                }
            }
        },
    }
}


def _batch(kind: type[Batch]) -> Callable[..., Any]:
    """Return a dependency that parses and checks a batch before any unit of work is opened."""

    async def parsed(request: Request, session: OwnSession, catalog: CatalogDep) -> tuple[Batch, int | None]:
        if not await request.body():
            raise Invalid("a JSON body is required")
        return await asyncio.to_thread(_parse_and_check, await request.json(), kind, session, catalog)

    return parsed


def _parse_and_check(body: Any, kind: type[Batch], session: Session, catalog: Catalog) -> tuple[Batch, int | None]:
    payload, seq = parse_batch(body, kind)
    check_payload(payload, catalog.get(session.base_model))
    return payload, seq


class Queue:
    """Queues a request's operation: one unit of work, run in one go."""

    def __init__(
        self,
        request: Request,
        response: Response,
        principal: Principal,
        session: Session,
        idempotency_key: str | None,
        database: Database,
        prices: Prices,
    ) -> None:
        self._request = request
        self._response = response
        self._principal = principal
        self._session = session
        self._key = idempotency_key
        self._database = database
        self._prices = prices

    async def add(self, payload: Payload, seq: int | None) -> OperationRead:
        """Queue a checked payload; headers of the response warn of budgets."""
        body = await self._database.prepare(self._principal.project_id, payload)

        async def work(unit: UnitOfWork) -> tuple[OperationRead, Mapping[str, str]]:
            operation = await submit(
                unit,
                project_id=self._principal.project_id,
                key_id=self._principal.key_id,
                session_id=self._session.id,
                body=body,
                seq=seq,
                idempotency_key=self._key,
            )
            await note_change(unit, self._request)
            return await _read(unit, operation, self._prices), warning_headers(unit.ledger.notices)

        operation, warnings = await self._database.apply(work)
        self._response.headers.update(warnings)
        return operation


async def _queue(
    request: Request,
    response: Response,
    principal: TrainCaller,
    session: OwnSession,
    idempotency_key: IdempotencyKey,
    database: DatabaseDep,
    prices: PricesDep,
) -> Queue:
    return Queue(request, response, principal, session, idempotency_key, database, prices)


Queueing = Annotated[Queue, Depends(_queue)]


async def _read(unit: UnitOfWork, operation: Operation, prices: Prices) -> OperationRead:
    metered = operation.status is Status.COMPLETED and operation.kind in _METERED
    facts = await unit.usage.of_source(operation.id) if metered else ()
    return operation_read(operation, facts, prices)


@router.post("/sessions/{session_id}/forward", status_code=202, openapi_extra=_BATCH_BODY)
async def create_forward(
    batch: Annotated[tuple[Forward, int | None], Depends(_batch(Forward))],
    queue: Queueing,
) -> OperationRead:
    """Queue a forward pass: log-probabilities and loss, no gradient."""
    return await queue.add(*batch)


@router.post("/sessions/{session_id}/forward_backward", status_code=202, openapi_extra=_BATCH_BODY)
async def create_forward_backward(
    batch: Annotated[tuple[ForwardBackward, int | None], Depends(_batch(ForwardBackward))],
    queue: Queueing,
) -> OperationRead:
    """Queue a forward and backward pass: adds the gradient of the summed loss to the session's accumulator."""
    return await queue.add(*batch)


@router.post("/sessions/{session_id}/optim_step", status_code=202)
async def create_optim_step(
    session: OwnSession,
    body: OptimStepCreate,
    catalog: CatalogDep,
    queue: Queueing,
) -> OperationRead:
    """Queue one AdamW step on the accumulated gradient."""
    payload = OptimStep(**body.adam_params.model_dump())
    try:
        check_payload(payload, catalog.get(session.base_model))
    except Invalid as error:
        error.field = f"adam_params.{error.field}"
        raise
    return await queue.add(payload, body.seq)


@router.post("/sessions/{session_id}/save_weights", status_code=202)
async def create_save_weights(
    session: OwnSession,
    body: SaveWeightsCreate,
    catalog: CatalogDep,
    queue: Queueing,
) -> OperationRead:
    """Queue a save as a new version; an eager one completes when the engines serve it."""
    payload = SaveWeights(
        group=session.group if body.model_package_group is None else body.model_package_group,
        merge=body.merge_weights,
        publish=Publish(body.publish),
        labels=body.labels(),
    )
    check_payload(payload, catalog.get(session.base_model))
    return await queue.add(payload, body.seq)


@router.post("/sessions/{session_id}/save_state", status_code=202)
async def create_save_state(
    session: OwnSession,
    body: SaveStateCreate,
    catalog: CatalogDep,
    queue: Queueing,
) -> OperationRead:
    """Queue a save of weights, moments and counters as a new, resumable version."""
    payload = SaveState(
        group=session.group if body.model_package_group is None else body.model_package_group,
        labels=body.labels(),
    )
    check_payload(payload, catalog.get(session.base_model))
    return await queue.add(payload, body.seq)


@router.post("/sessions/{session_id}/load_state", status_code=202)
async def create_load_state(
    principal: TrainCaller,
    body: LoadStateCreate,
    database: DatabaseDep,
    queue: Queueing,
) -> OperationRead:
    """Queue a load of a saved state, with its optimizer or with a fresh one."""
    async with database.read() as unit:
        version = await find_version(unit, principal.project_id, body.version, kind=VersionKind.STATE)
    payload = LoadState(version_id=version.id, optimizer=body.optimizer)
    return await queue.add(payload, body.seq)


@router.get("/operations/{operation_id}")
async def read_operation(
    operation_id: str,
    query: Annotated[WaitQuery, Query()],
    principal: Caller,
    futures: FuturesDep,
    database: DatabaseDep,
    prices: PricesDep,
    response: Response,
) -> OperationRead:
    """Read one operation; with ``wait``, answer as soon as it is final or after that many seconds."""
    operation = await futures.wait(principal.project_id, OperationId(operation_id), query.wait)
    async with database.read() as unit:
        read = await _read(unit, operation, prices)
    response.headers.update(cost_headers(read.cost_nanos, ()))
    return read


@router.get("/sessions/{session_id}/operations")
async def list_operations(
    session_id: str,
    query: Annotated[OperationsQuery, Query()],
    principal: Caller,
    prices: PricesDep,
    unit: Reading,
) -> OperationPage:
    """List a session's operations by seq, without their results."""
    session = await find_session(unit, principal.project_id, session_id)
    operations = await unit.operations.page(
        principal.project_id, session.id, limit=query.limit, after_seq=query.after_seq
    )
    return OperationPage(
        data=[await _read(unit, operation, prices) for operation in operations],
        next=operations[-1].seq if len(operations) == query.limit else None,
    )
