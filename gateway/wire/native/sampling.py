"""Sample tokens with one exact version. No unit of work is held while an engine computes."""

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel

from gateway.core.catalog import Catalog
from gateway.core.clock import Clock
from gateway.core.costs import cost_nanos
from gateway.core.errors import Invalid
from gateway.core.ids import SampleId, new_sample_id
from gateway.core.ledger import BudgetStanding
from gateway.core.limits import Allowance
from gateway.core.ports import Database, Engines, Prices, StoredSample
from gateway.core.principals import Principal
from gateway.core.sampling import Generation, SampleRequest, SamplingParams, Target, check_sample_request
from gateway.core.sessions import Session
from gateway.wire.answering import call_of
from gateway.wire.client_watch import ClientWatch, ClientWatchDep
from gateway.wire.deps import (
    AllowanceDep,
    CatalogDep,
    ClockDep,
    DatabaseDep,
    EnginesDep,
    FirstAnswersDep,
    IdempotencyKey,
    InferenceCaller,
    PricesDep,
    Tag,
)
from gateway.wire.idempotency import FirstAnswers, keep_answer, request_digest, stored_answer
from gateway.wire.limits import check_sizes
from gateway.wire.metering import Call, cost_headers, held, record
from gateway.wire.native.render import sequences_read, usage_read, version_address, version_id
from gateway.wire.native.schemas.base import Read
from gateway.wire.native.schemas.sampling import (
    FreeSampleCreate,
    SampleCreate,
    SampleRead,
)
from gateway.wire.native.sessions import OwnSession
from gateway.wire.routes import DialectRoute
from gateway.wire.targets import answer_headers, find_target, session_target

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
    tag: str | None
    allowance: Allowance
    client: ClientWatch

    async def of_session(self, session: Session, version: str | None) -> Target:
        return await session_target(self.database, self.engines, self.catalog, self.clock, session, version=version)

    async def free(self, version: str | None, base_model: str | None) -> Target:
        if base_model is not None and version is None:
            return Target(base=self.catalog.get(base_model), version=None, asker=self.principal.project_id)
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
        session: Session | None,
    ) -> Response:
        """Return the first answer to the idempotency key, or compute, record and return one."""
        async with self.first_answers.turn(self.principal.project_id, self.idempotency_key):
            content = await self.stored(asked)
            if content is None:
                content = await self.generated(asked, request, await resolve(), render, session=session, scoring=False)
        return billed_response(content)

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
        session: Session | None,
        scoring: bool,
    ) -> bytes:
        """Let an engine answer; the usage facts are durable on return.

        A ``scoring`` call does not pay for the one token that the engine has to generate.
        """
        check_sample_request(request, target.base)
        check_sizes(self.allowance, request, samples="num_samples")
        call = call_of(new_sample_id(), self.principal, session, target, request, tag=self.tag, scoring=scoring)
        async with (
            held(self.database, call, self.clock) as notices,
            self.client.watched(wanted_later=self.idempotency_key is not None) as stop,
        ):
            generation = await self.engines.generate(target, request, stop)
            if scoring:
                generation = dataclasses.replace(generation, counts=generation.counts.without_sampled())
            return await self._record(asked, call, generation, render, notices)

    async def _record(
        self, asked: str, call: Call, generation: Generation, render: Render, notices: Sequence[BudgetStanding]
    ) -> bytes:
        """Return a line with the headers, then the body: what a repeated key answers with."""
        now = self.clock.now()
        facts = call.facts(generation.counts, now)
        cost = cost_nanos(self.prices, facts)
        body = render(call.sample_id, call.target, generation, cost).model_dump_json().encode()
        content = orjson.dumps(cost_headers(cost, notices)) + b"\n" + body
        async with self.database.write() as unit:
            kept = content
            if self.idempotency_key is not None:
                sample = StoredSample(
                    id=call.sample_id, key=self.idempotency_key, request_digest=asked, content=content
                )
                kept = await keep_answer(unit, self.principal.project_id, sample)
            if kept is not content:  # another gateway answered first; that answer was paid for, this one is not
                facts = call.facts(generation.counts.unbilled(), now)
            await record(unit, call, facts, at=now)
        return kept


async def _sampler(
    principal: InferenceCaller,
    database: DatabaseDep,
    engines: EnginesDep,
    catalog: CatalogDep,
    prices: PricesDep,
    clock: ClockDep,
    first_answers: FirstAnswersDep,
    idempotency_key: IdempotencyKey,
    tag: Tag,
    allowance: AllowanceDep,
    client: ClientWatchDep,
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
        tag=tag,
        allowance=allowance,
        client=client,
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
        session=session,
    )


@router.post("/sample", responses=_SAMPLE)
async def sample_freely(sampler: SamplerDep, body: FreeSampleCreate) -> Response:
    """Draw samples from a published version or from a base model."""
    return await sampler.answer(
        asked_for("sample", body),
        _request(body),
        lambda: sampler.free(body.version, body.base_model),
        _sample_read,
        session=None,
    )


def billed_response(content: bytes) -> Response:
    """Return a recorded answer: a line with its headers, then its body, whose weights the headers name too."""
    recorded, _, body = content.partition(b"\n")
    document: dict[str, Any] = orjson.loads(body)
    headers = answer_headers(document["base_model"], document["version"], document["fingerprint"])
    return Response(body, media_type="application/json", headers={**orjson.loads(recorded), **headers})


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
