"""The runtime's sampling operations: taken into work at once, computed in the background, polled for their result."""

import asyncio
import secrets
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Response

from gateway.core.catalog import BaseModel, Catalog
from gateway.core.clock import Clock
from gateway.core.futures import MAX_WAIT_S
from gateway.core.ids import SampleId
from gateway.core.ports import Database, Engines
from gateway.core.principals import Principal
from gateway.core.results import Failure
from gateway.core.sampling import SampleRequest
from gateway.core.sessions import Session
from gateway.wire.answering import call_of, generated
from gateway.wire.deps import (
    AllowanceDep,
    Caller,
    CatalogDep,
    ClockDep,
    DatabaseDep,
    EnginesDep,
    InferenceCaller,
    PricesDep,
    SamplingJobsDep,
    ScoreFuturesDep,
)
from gateway.wire.limits import check_sizes
from gateway.wire.metering import held, paid_headers
from gateway.wire.sagemaker.models import RUNTIME, Document, service
from gateway.wire.sagemaker.names import find_training_session
from gateway.wire.sagemaker.polls import Polls
from gateway.wire.sagemaker.questions import sample_request, sampled, score_request
from gateway.wire.sagemaker.routes import Asked, SignedRoute
from gateway.wire.sagemaker.runtime import unknown_operation
from gateway.wire.sagemaker.targets import target_of
from gateway.wire.sagemaker.writing import answered
from gateway.wire.sampling_jobs import Answer, Answered
from gateway.wire.scoring import Scorer
from gateway.wire.targets import headers_of

EXECUTE = "ExecuteSamplingOperation"
RESULT = "GetSamplingOperationResult"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a sampling operation asks. ``request`` None only makes sure that the weights can answer."""

    name: str
    request: SampleRequest | None
    package: str | None

    @property
    def field(self) -> str:
        return f"operationConfig.{self.name}.modelPackageArn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """Answers the questions of one caller about one session."""

    principal: Principal
    session: Session
    database: Database
    engines: Engines
    catalog: Catalog
    clock: Clock
    scorer: Scorer

    async def answer(self, question: Question, sample_id: SampleId) -> Answered:
        """Compute and return an answer, to be stored with its usage.

        Raises:
            GatewayError: why there is none.
        """
        ports = (self.database, self.engines, self.catalog, self.clock)
        target = await target_of(*ports, self.session, question.package, field=question.field)
        request = question.request
        if request is None:
            return Answered(content=_completed(question.name, {}), headers=headers_of(target))
        scoring = question.name == "computeLogprobs"
        call = call_of(sample_id, self.principal, self.session, target, request, scoring=scoring)
        async with held(self.database, call, self.clock):
            generation = await generated(self.engines, self.scorer, target, request, sample_id)
            counts = generation.counts.without_sampled() if scoring else generation.counts
            result: Document = {"logprobs": generation.prompt_logprobs} if scoring else sampled(generation, request)
            content = await asyncio.to_thread(_completed, question.name, result)
            facts = call.facts(counts, self.clock.now())
        return Answered(content=content, headers=headers_of(target), call=call, facts=facts)


def _completed(name: str, result: Document) -> bytes:
    document = {"status": "Completed", "operationResult": {name: result}}
    return bytes(answered(service(RUNTIME).operation(RESULT), document).body)


async def _asker(
    asked: Asked,
    principal: InferenceCaller,
    catalog: CatalogDep,
    database: DatabaseDep,
    engines: EnginesDep,
    clock: ClockDep,
    scores: ScoreFuturesDep,
) -> Asker:
    async with database.read() as unit:
        session = await find_training_session(unit, principal.project_id, asked["trainingSessionName"])
    session.require_running()
    scorer = Scorer(
        database=database, futures=scores, clock=clock, principal=principal, idempotency_key=None, wait_s=MAX_WAIT_S
    )
    return Asker(
        principal=principal,
        session=session,
        database=database,
        engines=engines,
        catalog=catalog,
        clock=clock,
        scorer=scorer,
    )


def sampling_routes(polls: Polls) -> APIRouter:
    """Return the routes of sampling operations, at the paths of botocore's model."""
    router = APIRouter(route_class=SignedRoute)
    execute, result = service(RUNTIME).operation(EXECUTE), service(RUNTIME).operation(RESULT)

    @router.api_route(execute.path, methods=[execute.method], name=execute.name)
    async def execute_sampling_operation(
        asked: Asked, asker: Annotated[Asker, Depends(_asker)], jobs: SamplingJobsDep, allowance: AllowanceDep
    ) -> Response:
        """Take a question into work. Without a token, each request is a question of its own."""
        session = asker.session
        question = await asyncio.to_thread(_question, asked["operationConfig"], asker.catalog.get(session.base_model))
        if question.request is not None:
            check_sizes(allowance, question.request, samples="operationConfig.sample.numSamples")
        token = secrets.token_hex(16)
        sample_id = await jobs.start(
            session.project_id, f"{_key(session)}{token}", token, lambda sample_id: asker.answer(question, sample_id)
        )
        return answered(execute, {"operationId": sample_id})

    @router.api_route(result.path, methods=[result.method], name=result.name)
    async def get_sampling_operation_result(
        asked: Asked, principal: Caller, database: DatabaseDep, jobs: SamplingJobsDep, prices: PricesDep
    ) -> Response:
        """Say how a question stands, and its answer; held for a moment while there is none."""
        sample_id = SampleId(asked["operationId"])
        async with database.read() as unit:
            session = await find_training_session(unit, principal.project_id, asked["trainingSessionName"])
            sample = await unit.samples.get(principal.project_id, sample_id)
        if not sample.key.startswith(_key(session)):
            raise unknown_operation()
        with polls.holding(principal.key_id) as hold_s:
            answer = await jobs.wait(principal.project_id, sample_id, hold_s)
        match answer:
            case None:
                return answered(result, {"status": "InProgress"})
            case Answer():
                async with database.read() as unit:
                    headers = await paid_headers(unit, prices, sample_id)
                return Response(answer.content, media_type="application/json", headers={**answer.headers, **headers})
            case Failure():
                return answered(result, {"status": "Failed", "errorDetails": f"{answer.message} ({answer.code})"})

    return router


def _key(session: Session) -> str:
    """What the keys of a session's samples begin with."""
    return f"sagemaker:{session.id}:"


def _question(config: Document, model: BaseModel) -> Question:
    ((name, asked),) = config.items()
    match name:
        case "sample":
            request = sample_request(asked, model)
        case "computeLogprobs":
            request = score_request(asked, model)
        case _:
            request = None
    return Question(name=name, request=request, package=asked.get("modelPackageArn"))
