"""From a question to an answer: what an engine draws, and the trainer's scores of the targets beside it."""

from gateway.core.ids import SampleId
from gateway.core.ports import Engines
from gateway.core.sampling import Generation, Target
from gateway.core.scores import score_alternatives
from gateway.core.tensors import TensorData
from gateway.wire.answering import generated, score
from gateway.wire.scoring import Scorer
from gateway.wire.tinker.questions import Question


async def answer(
    engines: Engines, scorer: Scorer, target: Target, question: Question, sample_id: SampleId
) -> tuple[Generation, TensorData | None]:
    """Return what an engine drew, with exact prompt scores, and the scores of the question's targets.

    Raises:
        GatewayError: as ``generated`` says.
    """
    generation = await generated(engines, scorer, target, question.request, sample_id)
    if question.targets is None:
        return generation, None
    alternatives = score_alternatives(
        target.base,
        None if target.version is None else target.version.id,
        question.request.prompt[:-1],
        question.targets.rows,
        tokens_field="prompt",
        targets_field="target_prompt_logprobs",
    )
    return generation, (await score(scorer, alternatives, sample_id)).logprobs
