"""From a question to an answer: an engine samples; what it cannot score exactly, the base model's trainer scores."""

from dataclasses import replace

from gateway.core.errors import Invalid, Unavailable
from gateway.core.ids import SampleId
from gateway.core.ports import Engines
from gateway.core.sampling import Generation, Target
from gateway.core.scores import ScoreRequest, score_alternatives, score_targets
from gateway.core.tensors import TensorData
from gateway.wire.scoring import Scorer, engine_is_exact
from gateway.wire.tinker.questions import Question

_PATIENCE = 10  # waits of a minute for a trainer that is busy or away


async def answer(
    engines: Engines, scorer: Scorer, target: Target, question: Question, sample_id: SampleId
) -> tuple[Generation, TensorData | None]:
    """Return what an engine drew, with exact prompt scores, and the scores of the question's targets.

    Raises:
        Invalid: a prompt's most likely tokens under an adapter on the unembedding, which no engine gives exactly.
        GatewayError: as the engine and the trainer say.
    """
    request, prompt = question.request, question.request.prompt
    version = None if target.version is None else target.version.id
    exact = engine_is_exact(target.version)
    if request.topk_prompt_logprobs and not exact:
        raise Invalid(
            "topk_prompt_logprobs is not offered for adapters with train_unembed: engines leave the unembedding's "
            "adapter out of it; ask for target_prompt_logprobs, or train with train_unembed=False",
            code="unsupported_field",
            field="topk_prompt_logprobs",
        )
    by_trainer = request.prompt_logprobs and not exact
    generation = await engines.generate(target, replace(request, prompt_logprobs=False) if by_trainer else request)
    if by_trainer:
        known: tuple[float | None, ...] = (None,)
        if len(prompt) > 1:
            asked = score_targets(target.base, version, prompt[:-1], prompt[1:], tokens_field="prompt")
            known += tuple((await _score(scorer, asked, sample_id)).values())
        generation = replace(generation, prompt_logprobs=known)
    if question.targets is None:
        return generation, None
    alternatives = score_alternatives(
        target.base,
        version,
        prompt[:-1],
        question.targets.rows,
        tokens_field="prompt",
        targets_field="target_prompt_logprobs",
    )
    return generation, await _score(scorer, alternatives, sample_id)


async def _score(scorer: Scorer, request: ScoreRequest, sample_id: SampleId) -> TensorData:
    score = await scorer.ask(request, asked=sample_id, session_id=None)
    keyed = replace(scorer, idempotency_key=score.id)  # so that the end of one wait does not take the score back
    for _ in range(_PATIENCE - 1):
        try:
            return await keyed.logprobs(score)
        except Unavailable as error:
            if error.code != "score_pending":
                raise
    return await scorer.logprobs(score)
