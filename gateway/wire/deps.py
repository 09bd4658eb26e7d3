"""What requests get from the application: the lifespan's state, the caller, one unit of work.

``Reading`` and ``Writing`` are left before the response is sent, so a client that has an answer has a durable one.
Long polls and engine calls take neither; they open short units themselves through ``DatabaseDep``.
"""

from collections.abc import AsyncIterator
from typing import Annotated, TypedDict

from fastapi import Depends, Header, Request, Security
from fastapi.openapi.models import HTTPBearer
from fastapi.security.base import SecurityBase

from gateway.auth.keys import Keyring, require
from gateway.auth.known import KnownKeys
from gateway.core.catalog import Catalog
from gateway.core.clock import Clock
from gateway.core.errors import Invalid
from gateway.core.futures import Futures
from gateway.core.ids import OperationId, ScoreId
from gateway.core.limits import Allowance
from gateway.core.operations import Operation
from gateway.core.ports import Artifacts, Database, Engines, Grammars, Prices, UnitOfWork
from gateway.core.principals import Principal, Scope
from gateway.core.scores import Score
from gateway.core.sessions import Session
from gateway.wire.idempotency import FirstAnswers
from gateway.wire.limits import Limiter
from gateway.wire.sampling_jobs import SamplingJobs

MAX_IDEMPOTENCY_KEY = 255
MAX_TAG = 64
MAX_SUBJECT = 512

OperationFutures = Futures[OperationId, Operation]
ScoreFutures = Futures[ScoreId, Score]


class State(TypedDict):
    """What lives as long as the application. ``gateway.app`` fills it; every request sees it."""

    database: Database
    engines: Engines
    grammars: Grammars
    futures: OperationFutures
    score_futures: ScoreFutures
    catalog: Catalog
    prices: Prices
    clock: Clock
    keyring: Keyring
    keys: KnownKeys
    artifacts: Artifacts
    first_answers: FirstAnswers
    sampling_jobs: SamplingJobs
    limiter: Limiter
    max_body_bytes: int
    max_import_bytes: int
    undelete_s: float
    sagemaker_idle_s: int


async def _database(request: Request) -> Database:
    return request.state.database


async def _engines(request: Request) -> Engines:
    return request.state.engines


async def _futures(request: Request) -> OperationFutures:
    return request.state.futures


async def _score_futures(request: Request) -> ScoreFutures:
    return request.state.score_futures


async def _catalog(request: Request) -> Catalog:
    return request.state.catalog


async def _prices(request: Request) -> Prices:
    return request.state.prices


async def _clock(request: Request) -> Clock:
    return request.state.clock


async def _first_answers(request: Request) -> FirstAnswers:
    return request.state.first_answers


async def _undelete_s(request: Request) -> float:
    return request.state.undelete_s


UndeleteWindow = Annotated[float, Depends(_undelete_s)]  # seconds


async def _max_import_bytes(request: Request) -> int:
    return request.state.max_import_bytes


MaxImportBytes = Annotated[int, Depends(_max_import_bytes)]


async def _artifacts(request: Request) -> Artifacts:
    return request.state.artifacts


async def _sampling_jobs(request: Request) -> SamplingJobs:
    return request.state.sampling_jobs


DatabaseDep = Annotated[Database, Depends(_database)]
EnginesDep = Annotated[Engines, Depends(_engines)]
FuturesDep = Annotated[OperationFutures, Depends(_futures)]
ScoreFuturesDep = Annotated[ScoreFutures, Depends(_score_futures)]
CatalogDep = Annotated[Catalog, Depends(_catalog)]
PricesDep = Annotated[Prices, Depends(_prices)]
ClockDep = Annotated[Clock, Depends(_clock)]
FirstAnswersDep = Annotated[FirstAnswers, Depends(_first_answers)]
ArtifactsDep = Annotated[Artifacts, Depends(_artifacts)]
SamplingJobsDep = Annotated[SamplingJobs, Depends(_sampling_jobs)]


async def _reading(request: Request) -> AsyncIterator[UnitOfWork]:
    async with request.state.database.read() as unit:
        yield unit


async def _writing(request: Request) -> AsyncIterator[UnitOfWork]:
    async with request.state.database.write() as unit:
        yield unit
        await note_change(unit, request)


async def note_change(
    unit: UnitOfWork, request: Request, *, action: str | None = None, subject: str | None = None
) -> None:
    """Write what was done into the audit log, in the transaction that did it; by its route, if nothing else is said."""
    principal: Principal = request.state.principal
    named = ", ".join(f"{name}={value}" for name, value in sorted(request.path_params.items()))
    await unit.audit.add(
        principal.project_id,
        actor=principal.key_id,
        action=action or f"{request.method} {request.scope.get('root_path', '')}{request.scope['route'].path}",
        subject=(named if subject is None else subject)[:MAX_SUBJECT],
        request_id=request.state.request_id,
    )


async def _touching(request: Request) -> AsyncIterator[UnitOfWork]:
    async with request.state.database.write() as unit:
        yield unit


Reading = Annotated[UnitOfWork, Depends(_reading, scope="function")]
Writing = Annotated[UnitOfWork, Depends(_writing, scope="function")]
Touching = Annotated[UnitOfWork, Depends(_touching, scope="function")]
"""A unit for signs of life: nobody is to answer for them, so the audit log leaves them out."""


class Needs(SecurityBase):
    """Lets callers in whose key has one of ``scopes``, and returns them; ``wire.routes`` authenticated them. Without
    ``scopes`` a route only reads, which every key may.

    It is its own security scheme, for the OpenAPI page: FastAPI takes its time over every dependency of a dependency.
    """

    def __init__(self, *scopes: Scope) -> None:
        self.scheme_name = "HTTPBearer"
        self.model = HTTPBearer(description="An API key: tml-...")
        self.scopes = scopes

    async def __call__(self, request: Request) -> Principal:
        principal: Principal = request.state.principal
        if self.scopes:
            require(principal, *self.scopes)
        return principal


Caller = Annotated[Principal, Security(Needs())]
TrainCaller = Annotated[Principal, Security(Needs(Scope.TRAIN))]
InferenceCaller = Annotated[Principal, Security(Needs(Scope.INFERENCE))]
WorkCaller = Annotated[Principal, Security(Needs(Scope.INFERENCE, Scope.TRAIN))]
AdminCaller = Annotated[Principal, Security(Needs(Scope.ADMIN))]


async def _allowance(request: Request) -> Allowance:
    return request.state.allowance


def asking_session(request: Request) -> Session | None:
    """Return the session for which another dialect passes a request on: what is consumed counts as its own, whatever
    weights answer."""
    return getattr(request.state, "asking_session", None)


AllowanceDep = Annotated[Allowance, Depends(_allowance)]
"""What the caller may ask for; its rates were counted before the body was read."""


async def _idempotency_key(idempotency_key: Annotated[str | None, Header()] = None) -> str | None:
    if idempotency_key is not None and not (
        1 <= len(idempotency_key) <= MAX_IDEMPOTENCY_KEY and idempotency_key.isascii() and idempotency_key.isprintable()
    ):
        raise Invalid(
            f"Idempotency-Key must be 1 to {MAX_IDEMPOTENCY_KEY} printable ASCII characters", field="Idempotency-Key"
        )
    return idempotency_key


IdempotencyKey = Annotated[str | None, Depends(_idempotency_key)]


async def _tag(x_loopline_tag: Annotated[str | None, Header()] = None) -> str | None:
    if x_loopline_tag is not None and not (
        1 <= len(x_loopline_tag) <= MAX_TAG and x_loopline_tag.isascii() and x_loopline_tag.isprintable()
    ):
        raise Invalid(f"X-Loopline-Tag must be 1 to {MAX_TAG} printable ASCII characters", field="X-Loopline-Tag")
    return x_loopline_tag


Tag = Annotated[str | None, Depends(_tag)]
"""The caller's own label for what a sampling call consumes; usage can be grouped by it."""
