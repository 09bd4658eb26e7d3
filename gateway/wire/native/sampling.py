"""Sample tokens with one exact version. No unit of work is held while an engine computes."""

import dataclasses
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel

from gateway.core.catalog import Catalog
from gateway.core.clock import Clock
from gateway.core.errors import Invalid
from gateway.core.ids import SampleId, SessionId, new_sample_id
from gateway.core.ports import Database, Engines, Prices, StoredSample
from gateway.core.principals import Principal
from gateway.core.sampling import Generation, SampleRequest, SamplingParams, Target, check_sample_request
from gateway.core.sessions import Session
from gateway.wire.deps import (
    CatalogDep,
    ClockDep,
    DatabaseDep,
    EnginesDep,
    FirstAnswersDep,
    IdempotencyKey,
    InferenceCaller,
    PricesDep,
)
from gateway.wire.idempotency import FirstAnswers, keep_answer, request_digest, stored_answer
from gateway.wire.metering import cost_nanos, record, sampling_facts
from gateway.wire.native.render import sequences_read, usage_read, version_address, version_id
from gateway.wire.native.schemas.base import Read
from gateway.wire.native.schemas.sampling import (
    FreeSampleCreate,
    SampleCreate,
    SampleRead,
)
from gateway.wire.native.sessions import OwnSession
from gateway.wire.routes import DialectRoute
from gateway.wire.targets import find_target, session_target

router = APIRouter(route_class=DialectRoute, tags=["sampling"])

Resolve = Callable[[], Awaitable[Target]]
Render = Callable[[SampleId, Target, Generation, int], Read]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Answers one call: everything it needs beside the question."""

    principal: Principal
    database: Database
    engines: Engines
    catalog: Catalog
    prices: Prices
    clock: Clock
    first_answers: FirstAnswers
    idempotency_key: str | None

    async def of_session(self, session: Session, version: str | None) -> Target:
        return await session_target(self.database, self.engines, self.catalog, self.clock, session, version=version)

    async def free(self, version: str | None, base_model: str | None) -> Target:
        if base_model is not None and version is None:
            return Target(base=self.catalog.get(base_model), version=None)
        if version is None or base_model is not None:
            raise Invalid("give exactly one of version and base_model", field="version")
        return await find_target(
            self.database, self.engines, self.catalog, self.clock, self.principal.project_id, version
        )

    async def answer(
        self,
        asked: str,
        request: SampleRequest,
        resolve: Resolve,
        render: Render,
        *,
        session_id: SessionId | None,
    ) -> Response:
        """Return the first answer to the idempotency key, or compute, record and return one."""
        async with self.first_answers.turn(self.principal.project_id, self.idempotency_key):
            content = await self.stored(asked)
            if content is None:
                content = await self.generated(
                    asked, request, await resolve(), render, session_id=session_id, scoring=False
                )
        return Response(content, media_type="application/json")

    async def stored(self, asked: str) -> bytes | None:
        """Return the first answer to the idempotency key, if there is one."""
        return await stored_answer(self.database, self.principal.project_id, self.idempotency_key, asked)

    async def generated(
        self,
        asked: str,
        request: SampleRequest,
        target: Target,
        render: Render,
        *,
        session_id: SessionId | None,
        scoring: bool,
    ) -> bytes:
        """Let an engine answer; the usage facts are durable on return.

        A ``scoring`` call does not pay for the one token that the engine has to generate.
        """
        check_sample_request(request, target.base)
        generation = await self.engines.generate(target, request)
        if scoring:
            counts = dataclasses.replace(generation.counts, sampled=0)
            generation = dataclasses.replace(generation, counts=counts)
        return await self._record(asked, target, generation, render, session_id)

    async def _record(
        self, asked: str, target: Target, generation: Generation, render: Render, session_id: SessionId | None
    ) -> bytes:
        sample_id, now = new_sample_id(), self.clock.now()
        facts = sampling_facts(
            generation.counts,
            sample_id=sample_id,
            principal=self.principal,
            session_id=session_id,
            target=target,
            at=now,
        )
        content = render(sample_id, target, generation, cost_nanos(self.prices, facts)).model_dump_json().encode()
        async with self.database.write() as unit:
            if self.idempotency_key is not None:
                kept = await keep_answer(
                    unit,
                    self.principal.project_id,
                    self.idempotency_key,
                    StoredSample(id=sample_id, request_digest=asked, content=content),
                )
                if kept is not content:  # another gateway answered first; that answer was paid for, this one is not
                    return kept
            await record(unit, facts, session_id=session_id, at=now)
        return content


def _sampler(
    principal: InferenceCaller,
    database: DatabaseDep,
    engines: EnginesDep,
    catalog: CatalogDep,
    prices: PricesDep,
    clock: ClockDep,
    first_answers: FirstAnswersDep,
    idempotency_key: IdempotencyKey,
) -> Sampler:
    return Sampler(
        principal=principal,
        database=database,
        engines=engines,
        catalog=catalog,
        prices=prices,
        clock=clock,
        first_answers=first_answers,
        idempotency_key=idempotency_key,
    )


SamplerDep = Annotated[Sampler, Depends(_sampler)]
_SAMPLE: dict[int | str, dict[str, Any]] = {200: {"model": SampleRead}}


@router.post("/sessions/{session_id}/sample", responses=_SAMPLE)
async def sample(sampler: SamplerDep, session: OwnSession, body: SampleCreate) -> Response:
    """Draw samples from the session's latest published version, or from the pinned one."""
    return await sampler.answer(
        asked_for(f"{session.id}/sample", body),
        _request(body),
        lambda: sampler.of_session(session, body.version),
        _sample_read,
        session_id=session.id,
    )


@router.post("/sample", responses=_SAMPLE)
async def sample_freely(sampler: SamplerDep, body: FreeSampleCreate) -> Response:
    """Draw samples from a published version or from a base model."""
    return await sampler.answer(
        asked_for("sample", body),
        _request(body),
        lambda: sampler.free(body.version, body.base_model),
        _sample_read,
        session_id=None,
    )


def asked_for(route: str, body: BaseModel) -> str:
    """Return what says that two requests of this dialect ask the same."""
    return request_digest(f"native/{route}", body.model_dump_json().encode())


def _request(body: SampleCreate) -> SampleRequest:
    return SampleRequest(
        prompt=tuple(body.prompt),
        num_samples=body.num_samples,
        params=SamplingParams(
            max_tokens=body.max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            seed=body.seed,
            stop=tuple(body.stop),
            stop_token_ids=tuple(body.stop_token_ids),
            ignore_eos=body.ignore_eos,
        ),
        prompt_logprobs=body.prompt_logprobs,
        topk_prompt_logprobs=body.topk_prompt_logprobs,
    )


def _sample_read(sample_id: SampleId, target: Target, generation: Generation, cost: int) -> SampleRead:
    topk = generation.topk_prompt_logprobs
    return SampleRead(
        id=sample_id,
        base_model=target.base.name,
        version=version_address(target),
        version_id=version_id(target),
        fingerprint=target.fingerprint,
        sequences=sequences_read(generation),
        prompt_logprobs=None if generation.prompt_logprobs is None else list(generation.prompt_logprobs),
        topk_prompt_logprobs=None
        if topk is None
        else [None if row is None else sorted(row.items(), key=lambda item: -item[1]) for row in topk],
        usage=usage_read(generation.counts),
        cost_nanos=cost,
    )
