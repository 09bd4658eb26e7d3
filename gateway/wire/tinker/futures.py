"""Results: one route for whatever was submitted, by the id that the submission returned."""

from typing import Any, assert_never

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from gateway.core.clients import parse_loss_address
from gateway.core.errors import Conflict, Kind
from gateway.core.ids import OperationId, ProjectId, SampleId, SessionId
from gateway.core.operations import Operation, Status
from gateway.core.ports import Database, Prices, UnitOfWork
from gateway.core.results import Failure, ForwardResult, LoadStateResult, OptimStepResult, SaveResult
from gateway.core.sessions import Activity, Session
from gateway.wire.deps import Caller, DatabaseDep, FuturesDep, PricesDep, SamplingJobsDep, WorkCaller
from gateway.wire.metering import paid_headers
from gateway.wire.sampling_jobs import Answer, SamplingJobs
from gateway.wire.tinker.checkpoints import path_of
from gateway.wire.tinker.errors import failed, render
from gateway.wire.tinker.losses import find_loss
from gateway.wire.tinker.protobuf import encode_forward
from gateway.wire.tinker.routes import PROTOBUF, TinkerRoute
from gateway.wire.tinker.schemas import CancelAsked, RetrieveAsked, TryAgain

HOLD_S = 25.0  # the client gives up on an answer after 45 s
_TYPES = {"weights": "save_weights", "sampler_weights": "save_weights_for_sampler"}

router = APIRouter(route_class=TinkerRoute)


@router.post("/retrieve_future")
async def retrieve_future(
    body: RetrieveAsked,
    request: Request,
    principal: Caller,
    database: DatabaseDep,
    futures: FuturesDep,
    jobs: SamplingJobsDep,
    prices: PricesDep,
) -> Response:
    """Answer with the result as soon as it is there, or after a while with ``try_again``. Asking again is fine."""
    project_id, id = principal.project_id, body.request_id
    if id.startswith("smp-"):
        response = await _sample(jobs, project_id, SampleId(id), request)
        return await _priced(database, prices, id, response)
    if id.startswith("sess-"):
        async with database.read() as unit:
            session = await unit.sessions.get(project_id, SessionId(id))
        return JSONResponse({"model_id": session.address, "type": "create_model"})
    if parse_loss_address(id) is not None:
        async with database.read() as unit:
            await find_loss(unit, project_id, id)
        return JSONResponse({"loss_id": id, "type": "create_custom_loss"})
    operation = await futures.wait(project_id, OperationId(id), HOLD_S)
    return await _priced(database, prices, id, await _operation(database, operation))


async def _priced(database: Database, prices: Prices, source: str, response: Response) -> Response:
    """Add what ``source`` has cost up to now."""
    async with database.read() as unit:
        response.headers.update(await paid_headers(unit, prices, source))
    return response


@router.post("/cancel_future", status_code=204, response_class=Response)
async def cancel_future(body: CancelAsked, principal: WorkCaller, database: DatabaseDep, jobs: SamplingJobsDep) -> None:
    """Give a sample up; one that is answered already keeps its answer."""
    sample_id = SampleId(body.request_id)
    async with database.read() as unit:
        await unit.samples.get(principal.project_id, sample_id)
    jobs.cancel(sample_id)


async def _sample(jobs: SamplingJobs, project_id: ProjectId, sample_id: SampleId, request: Request) -> Response:
    answer = await jobs.wait(project_id, sample_id, HOLD_S)
    match answer:
        case None:
            waiting = TryAgain(request_id=sample_id, queue_state="active", queue_state_reason=None)
            return JSONResponse(waiting.model_dump())
        case Answer():
            return Response(answer.content, media_type=PROTOBUF, headers=dict(answer.headers))
        case Failure(kind=Kind.UNAVAILABLE):
            # 410 makes the client sample again, under a new number.
            return render(request, Conflict(answer.message, code=answer.code), status=410)
        case Failure():
            return JSONResponse(failed(answer))


async def _operation(database: Database, operation: Operation) -> Response:
    async with database.read() as unit:
        match operation.outcome:
            case None if operation.final:
                return JSONResponse(failed(_UNRUN[operation.status]))
            case None:
                session = await unit.sessions.get(operation.project_id, operation.session_id)
                return JSONResponse(_waiting(operation, session).model_dump())
            case Failure() as failure:
                return JSONResponse(failed(failure))
            case ForwardResult() as result:
                return Response(encode_forward(result), media_type=PROTOBUF)
            case OptimStepResult() as result:
                return JSONResponse({"metrics": dict(result.metrics), "type": "optim_step"})
            case SaveResult() as result:
                return JSONResponse(await _saved(unit, operation, result))
            case LoadStateResult() as result:
                session = await unit.sessions.get(operation.project_id, operation.session_id)
                version = await unit.versions.get(operation.project_id, result.version_id)
                return JSONResponse(
                    {"path": await path_of(unit, version), "model_id": session.address, "type": "load_weights"}
                )
            case _:
                assert_never(operation.outcome)


async def _saved(unit: UnitOfWork, operation: Operation, result: SaveResult) -> dict[str, Any]:
    """Return the answer of a save: the sampler that it made, or else the path of what it saved."""
    sampler = await unit.clients.sampler_of_operation(operation.id)
    if sampler is not None:
        return {"sampling_session_id": sampler.seat.sampler_address, "type": "save_weights_for_sampler"}
    version = await unit.versions.get(operation.project_id, result.version_id)
    path = await path_of(unit, version)
    space = path.split("/")[3]
    answer: dict[str, Any] = {"path": path, "type": _TYPES.get(space, "save_weights_external")}
    if space == "external_weights":
        answer["size_bytes"] = version.size_bytes
    return answer


_UNRUN = {
    Status.SKIPPED: Failure(
        kind=Kind.CONFLICT,
        code="operation_skipped",
        message="the session stopped or failed before this request ran",
    ),
    Status.CANCELLED: Failure(
        kind=Kind.CONFLICT, code="operation_cancelled", message="this request was refused when it was submitted"
    ),
}


def _waiting(operation: Operation, session: Session) -> TryAgain:
    """Say why there is no result yet; ``paused_capacity`` is what a user could change nothing about."""
    state, reason = "active", None
    if session.activity is Activity.RECOVERING:
        state, reason = "paused_capacity", "a trainer rebuilds the session's state"
    elif operation.waits_for_seq is not None:
        reason = f"request {operation.waits_for_seq - 1} has not arrived, and comes first"
    elif operation.queue_position:
        reason = f"{operation.queue_position} earlier requests of this model come first"
    elif operation.status is Status.QUEUED:
        state, reason = "paused_capacity", "the trainer is busy with other models, or away"
    elif operation.progress is not None:
        reason = f"{operation.progress.done} of {operation.progress.total} datums are done"
    return TryAgain(request_id=operation.id, queue_state=state, queue_state_reason=reason)
