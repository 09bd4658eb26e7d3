"""Score given tokens with one exact version: by an engine where it is exact, else by the base model's trainer."""

from collections.abc import Sequence
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Response

from gateway.core.costs import cost_nanos
from gateway.core.errors import Invalid
from gateway.core.ids import SampleId
from gateway.core.sampling import Generation, SampleRequest, SamplingParams, Target, TokenCounts
from gateway.core.scores import Score, ScoreRequest, check_temperature, score_alternatives, score_targets
from gateway.core.sessions import Session
from gateway.core.tensors import TensorData
from gateway.core.validation import check_tokens
from gateway.wire.deps import ScoreFuturesDep
from gateway.wire.metering import cost_headers
from gateway.wire.native.render import usage_read, version_address, version_id
from gateway.wire.native.sampling import Resolve, Sampler, SamplerDep, asked_for, billed_response
from gateway.wire.native.schemas.sampling import FreeLogprobsCreate, LogprobsCreate, LogprobsRead
from gateway.wire.native.sessions import OwnSession
from gateway.wire.routes import DialectRoute
from gateway.wire.scoring import Scorer, engine_is_exact

router = APIRouter(route_class=DialectRoute, tags=["sampling"])

_LOGPROBS: dict[int | str, dict[str, Any]] = {200: {"model": LogprobsRead}}


async def _scorer(sampler: SamplerDep, futures: ScoreFuturesDep) -> Scorer:
    return Scorer(
        database=sampler.database,
        futures=futures,
        clock=sampler.clock,
        principal=sampler.principal,
        idempotency_key=sampler.idempotency_key,
    )


ScorerDep = Annotated[Scorer, Depends(_scorer)]


@router.post("/sessions/{session_id}/logprobs", responses=_LOGPROBS)
async def logprobs(sampler: SamplerDep, scorer: ScorerDep, session: OwnSession, body: LogprobsCreate) -> Response:
    """Score a prompt, or targets after each of its tokens, with the session's latest published version or a pin."""
    return await _answer(
        sampler,
        scorer,
        asked_for(f"{session.id}/logprobs", body),
        body,
        lambda: sampler.of_session(session, body.version),
        session,
    )


@router.post("/logprobs", responses=_LOGPROBS)
async def logprobs_freely(sampler: SamplerDep, scorer: ScorerDep, body: FreeLogprobsCreate) -> Response:
    """Score a prompt, or targets after each of its tokens, with a published version or with a base model."""
    return await _answer(
        sampler,
        scorer,
        asked_for("logprobs", body),
        body,
        lambda: sampler.free(body.version, body.base_model),
        None,
    )


async def _answer(
    sampler: Sampler,
    scorer: Scorer,
    asked: str,
    body: LogprobsCreate,
    resolve: Resolve,
    session: Session | None,
) -> Response:
    """Return the first answer to the idempotency key; one that a trainer still computes is waited for."""
    if body.targets is not None and body.alternatives is not None:
        raise Invalid("give at most one of targets and alternatives", field="alternatives")
    check_temperature(body.temperature)
    async with sampler.first_answers.turn(sampler.principal.project_id, sampler.idempotency_key):
        content = await sampler.stored(asked)
        if content is None:
            content = await _computed(sampler, scorer, asked, body, resolve, session)
    return billed_response(content)


async def _computed(
    sampler: Sampler,
    scorer: Scorer,
    asked: str,
    body: LogprobsCreate,
    resolve: Resolve,
    session: Session | None,
) -> bytes:
    score = await scorer.known(asked)
    if score is None:
        target = await resolve()
        request = _request(body, target)
        if request is None:
            return await sampler.generated(
                asked, _prompt_request(body), target, _engine_read, session=session, scoring=True
            )
        session_id = None if session is None else session.id
        score = await scorer.ask(request, asked=asked, session_id=session_id)
    else:
        target = await scorer.target(score, sampler.catalog)
    found = (await scorer.result(score)).logprobs
    facts = await scorer.facts(score)
    cost = cost_nanos(sampler.prices, facts)
    answer = _score_read(body, score, target, found, cost).model_dump_json().encode()
    return orjson.dumps(cost_headers(cost, ())) + b"\n" + answer


def _request(body: LogprobsCreate, target: Target) -> ScoreRequest | None:
    """Return what the trainer must score; None: an engine answers exactly."""
    model, version = target.base, None if target.version is None else target.version.id
    prompt, temperature = body.prompt, body.temperature
    if body.targets is not None:
        return score_targets(model, version, prompt, body.targets, temperature=temperature, tokens_field="prompt")
    if body.alternatives is not None:
        return score_alternatives(
            model,
            version,
            prompt,
            body.alternatives,
            temperature=temperature,
            tokens_field="prompt",
            targets_field="alternatives",
        )
    if len(prompt) < 2 or engine_is_exact(target.version, temperature=temperature):
        return None
    check_tokens(prompt, model, field="prompt")
    return score_targets(model, version, prompt[:-1], prompt[1:], temperature=temperature, tokens_field="prompt")


def _prompt_request(body: LogprobsCreate) -> SampleRequest:
    """Engines score a prompt while they generate; one greedy token is the least they do."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    return SampleRequest(prompt=tuple(body.prompt), params=params, prompt_logprobs=True)


def _engine_read(sample_id: SampleId, target: Target, generation: Generation, cost: int) -> LogprobsRead:
    return LogprobsRead(
        id=sample_id,
        base_model=target.base.name,
        version=version_address(target),
        version_id=version_id(target),
        fingerprint=target.fingerprint,
        logprobs=list(generation.prompt_logprobs or ()),
        alternative_logprobs=None,
        usage=usage_read(generation.counts),
        cost_nanos=cost,
    )


def _score_read(body: LogprobsCreate, score: Score, target: Target, found: TensorData, cost: int) -> LogprobsRead:
    values: Sequence[float] = found.values().tolist()
    unscored: list[float | None] = [] if body.targets is not None else [None]
    counts = TokenCounts(engine="", prompt=found.shape[0], cached=0, sampled=0)
    return LogprobsRead(
        id=score.id,
        base_model=target.base.name,
        version=version_address(target),
        version_id=version_id(target),
        fingerprint=target.fingerprint,
        logprobs=None if body.alternatives is not None else [*unscored, *values],
        alternative_logprobs=None if body.alternatives is None else _rows(values, found.shape[-1]),
        usage=usage_read(counts),
        cost_nanos=cost,
    )


def _rows(values: Sequence[float], width: int) -> list[list[float]]:
    return [list(values[start : start + width]) for start in range(0, len(values), width)]
