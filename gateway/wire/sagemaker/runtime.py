"""The runtime's training operations: submitted with a sequence number and a token, polled for their result."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import APIRouter, Request, Response

from gateway.core.clock import Clock
from gateway.core.errors import GatewayError, NotFound
from gateway.core.ids import OperationId
from gateway.core.opening import check_rank
from gateway.core.payloads import LoadState, Payload
from gateway.core.ports import UnitOfWork
from gateway.core.principals import Principal
from gateway.core.submission import submit
from gateway.wire.deps import Caller, CatalogDep, ClockDep, DatabaseDep, FuturesDep, PricesDep, TrainCaller, note_change
from gateway.wire.metering import paid_headers
from gateway.wire.sagemaker.models import RUNTIME, Document, service
from gateway.wire.sagemaker.names import find_package, find_training_session
from gateway.wire.sagemaker.payloads import payload_of
from gateway.wire.sagemaker.polls import Polls
from gateway.wire.sagemaker.results import result_of
from gateway.wire.sagemaker.routes import Asked, SignedRoute, TurnRoute
from gateway.wire.sagemaker.writing import answered

_LOADED = "operationConfig.loadState.modelPackageArn"


def training_routes(polls: Polls) -> tuple[APIRouter, APIRouter]:
    """Return the routes of training operations, at the paths of botocore's model."""
    turns, reads = APIRouter(route_class=TurnRoute), APIRouter(route_class=SignedRoute)
    execute = service(RUNTIME).operation("ExecuteTrainingOperation")
    result = service(RUNTIME).operation("GetTrainingOperationResult")

    @turns.api_route(execute.path, methods=[execute.method], name=execute.name)
    async def execute_training_operation(
        asked: Asked,
        request: Request,
        principal: TrainCaller,
        catalog: CatalogDep,
        clock: ClockDep,
        database: DatabaseDep,
    ) -> Response:
        """Queue an operation. The same number and token with the same content name the same operation."""
        async with database.read() as unit:
            session = await find_training_session(unit, principal.project_id, asked["trainingSessionName"])
        ((name, config),) = asked["operationConfig"].items()
        model = catalog.get(session.base_model)
        if name != "loadState":
            check_rank(session.lora.rank, model)
            payload = await asyncio.to_thread(payload_of, name, config, session.group, model)
        else:
            async with database.read() as unit:
                payload = await _load(unit, principal, clock, config)
        token, body = asked.get("clientToken"), await database.prepare(principal.project_id, payload)

        async def work(unit: UnitOfWork) -> OperationId:
            with _spelled():
                operation = await submit(
                    unit,
                    project_id=principal.project_id,
                    key_id=principal.key_id,
                    session_id=session.id,
                    body=body,
                    seq=asked["sequenceNumber"],
                    idempotency_key=None if token is None else f"sagemaker:{session.id}:{token}",
                    adopting=True,
                )
            await note_change(unit, request)
            return operation.id

        return answered(execute, {"operationId": await database.apply(work)})

    @reads.api_route(result.path, methods=[result.method], name=result.name)
    async def get_training_operation_result(
        asked: Asked, principal: Caller, database: DatabaseDep, futures: FuturesDep, prices: PricesDep
    ) -> Response:
        """Say how an operation stands, and what came of it; held for a moment while nothing did."""
        async with database.read() as unit:
            session = await find_training_session(unit, principal.project_id, asked["trainingSessionName"])
        with polls.holding(principal.key_id) as hold_s:
            operation = await futures.wait(principal.project_id, OperationId(asked["operationId"]), hold_s)
        if operation.session_id != session.id:
            raise unknown_operation()
        async with database.read() as unit:
            document = await result_of(unit, operation)
            headers = await paid_headers(unit, prices, operation.id)
        response = await asyncio.to_thread(answered, result, document)
        response.headers.update(headers)
        return response

    return turns, reads


@contextmanager
def _spelled() -> Iterator[None]:
    """Name the version of a refused load as this dialect does."""
    try:
        yield
    except GatewayError as error:
        if error.field == "version":
            error.field = _LOADED
        raise


async def _load(unit: UnitOfWork, principal: Principal, clock: Clock, config: Document) -> Payload:
    version = await find_package(unit, principal.project_id, config["modelPackageArn"], field=_LOADED)
    version.require_present(clock.now(), field=_LOADED)
    return LoadState(version_id=version.id, optimizer=config["loadOptimizer"])


def unknown_operation() -> NotFound:
    """Return the one refusal of an operation that does not exist, or not in this session."""
    return NotFound("no such operation in this session", code="operation_not_found", field="operationId")
