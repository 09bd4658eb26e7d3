"""From a sampling request to an answer: an engine samples; what it cannot score exactly, the base model's trainer does.

Shared by the dialects whose samples are taken into work and fetched later, so that patience costs nobody a connection.
"""

from collections.abc import Mapping
from dataclasses import replace

from gateway.core.errors import Unavailable
from gateway.core.ids import SampleId
from gateway.core.ports import Engines
from gateway.core.principals import Principal
from gateway.core.sampling import Generation, SampleRequest, Target
from gateway.core.scores import ScoreRequest, ScoreResult, score_targets
from gateway.core.sessions import Session
from gateway.wire.metering import Call
from gateway.wire.scoring import Scorer, engine_is_exact

_PATIENCE = 10  # waits of a minute for a trainer that is busy or away


async def generated(
    engines: Engines, scorer: Scorer, target: Target, request: SampleRequest, sample_id: SampleId
) -> Generation:
    """Return what an engine drew, with exact prompt scores: under an adapter on the unembedding they are a trainer's.

    Raises:
        GatewayError: as the engine and the trainer say.
    """
    scored = request.prompt_logprobs or request.topk_prompt_logprobs > 0
    if not scored or engine_is_exact(target.version):
        return await engines.generate(target, request)
    generation = await engines.generate(target, replace(request, prompt_logprobs=False, topk_prompt_logprobs=0))
    logprobs, ranked = await _prompt_scores(scorer, target, request, sample_id)
    return replace(
        generation,
        prompt_logprobs=logprobs if request.prompt_logprobs else None,
        topk_prompt_logprobs=ranked if request.topk_prompt_logprobs else None,
    )


async def _prompt_scores(
    scorer: Scorer, target: Target, request: SampleRequest, sample_id: SampleId
) -> tuple[tuple[float | None, ...], tuple[Mapping[int, float] | None, ...]]:
    """Return a trainer's score of each prompt token, and the likeliest tokens at its place; nothing at position 0."""
    prompt = request.prompt
    if len(prompt) == 1:
        return (None,), (None,)
    version, best = None if target.version is None else target.version.id, request.topk_prompt_logprobs
    asked = score_targets(target.base, version, prompt[:-1], prompt[1:], likeliest=best, tokens_field="prompt")
    result = await score(scorer, asked, sample_id)
    ranked = () if result.likeliest is None else tuple(result.likeliest.rows())
    return (None, *result.logprobs.values()), (None, *ranked)


async def score(scorer: Scorer, request: ScoreRequest, sample_id: SampleId) -> ScoreResult:
    """Return a score of a trainer, which may be busy for minutes.

    Raises:
        GatewayError: why it could not be computed.
        Unavailable: ``score_pending``, no trainer has in all that time.
    """
    asked = await scorer.ask(request, asked=sample_id, session_id=None)
    keyed = replace(scorer, idempotency_key=asked.id)  # so that the end of one wait does not take the score back
    for _ in range(_PATIENCE - 1):
        try:
            return await keyed.result(asked)
        except Unavailable as error:
            if error.code != "score_pending":
                raise
    return await scorer.result(asked)


def call_of(
    sample_id: SampleId,
    principal: Principal,
    session: Session | None,
    target: Target,
    request: SampleRequest,
    *,
    tag: str | None = None,
    scoring: bool = False,
) -> Call:
    """Say what a request can consume at most: where prompts are scored token by token, every prefix of it, too.

    A ``scoring`` call does not pay for the one token that the engine has to generate.
    """
    prompt, limit = len(request.prompt), request.params.max_tokens
    sampled = request.num_samples * (target.base.context_length - prompt if limit is None else limit)
    prefixes = prompt if request.prompt_logprobs or request.topk_prompt_logprobs else 0
    return Call(
        sample_id=sample_id,
        principal=principal,
        session=session,
        target=target,
        tag=tag,
        prompt=prompt,
        sampled=0 if scoring else sampled,
        engine_prompt=request.num_samples * prompt + prefixes * prompt,
        engine_sampled=sampled + prefixes,
        scoring=scoring,
    )
