"""From a sampling request to an answer: an engine samples; what it cannot score exactly, the base model's trainer does.

Shared by the dialects whose samples are taken into work and fetched later, so that patience costs nobody a connection.
"""

from dataclasses import replace

from gateway.core.errors import Invalid, Unavailable
from gateway.core.ids import SampleId
from gateway.core.ports import Engines
from gateway.core.principals import Principal
from gateway.core.sampling import Generation, SampleRequest, Target
from gateway.core.scores import ScoreRequest, score_targets
from gateway.core.sessions import Session
from gateway.core.tensors import TensorData
from gateway.wire.metering import Call
from gateway.wire.scoring import Scorer, engine_is_exact

_PATIENCE = 10  # waits of a minute for a trainer that is busy or away


async def generated(
    engines: Engines, scorer: Scorer, target: Target, request: SampleRequest, sample_id: SampleId, *, topk_field: str
) -> Generation:
    """Return what an engine drew, with exact prompt scores. ``topk_field`` is how the dialect spells the field.

    Raises:
        Invalid: a prompt's most likely tokens under an adapter on the unembedding, which no engine gives exactly.
        GatewayError: as the engine and the trainer say.
    """
    exact = engine_is_exact(target.version)
    if request.topk_prompt_logprobs and not exact:
        raise Invalid(
            f"{topk_field} is not offered for adapters with train_unembed: engines leave the unembedding's adapter out "
            "of it; ask for the log-probabilities of given tokens, or train with train_unembed=False",
            code="unsupported_field",
            field=topk_field,
        )
    if not request.prompt_logprobs or exact:
        return await engines.generate(target, request)
    generation = await engines.generate(target, replace(request, prompt_logprobs=False))
    prompt, known = request.prompt, (None,)
    scores: tuple[float, ...] = ()
    if len(prompt) > 1:
        version = None if target.version is None else target.version.id
        asked = score_targets(target.base, version, prompt[:-1], prompt[1:], tokens_field="prompt")
        scores = tuple((await score(scorer, asked, sample_id)).values())
    return replace(generation, prompt_logprobs=known + scores)


async def score(scorer: Scorer, request: ScoreRequest, sample_id: SampleId) -> TensorData:
    """Return log-probabilities of a trainer, which may be busy for minutes.

    Raises:
        GatewayError: why they could not be computed.
        Unavailable: ``score_pending``, no trainer has in all that time.
    """
    asked = await scorer.ask(request, asked=sample_id, session_id=None)
    keyed = replace(scorer, idempotency_key=asked.id)  # so that the end of one wait does not take the score back
    for _ in range(_PATIENCE - 1):
        try:
            return await keyed.logprobs(asked)
        except Unavailable as error:
            if error.code != "score_pending":
                raise
    return await scorer.logprobs(asked)


def call_of(
    sample_id: SampleId,
    principal: Principal,
    session: Session | None,
    target: Target,
    request: SampleRequest,
    *,
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
        tag=None,
        prompt=prompt,
        sampled=0 if scoring else sampled,
        engine_prompt=request.num_samples * prompt + prefixes * prompt,
        engine_sampled=sampled + prefixes,
    )
