"""400 samples at once from one process while training goes on: none fails, each is of the version it was pinned to.

Two versions give the same prompt different scores, the further apart the more training lies between them; so the
prompt's scores in an answer tell which version gave it.
"""

import numpy as np
import tinker
from tinker import types

from tests.tinker_acceptance.outcome import Outcome
from tests.tinker_acceptance.place import Place
from tests.tinker_acceptance.sessions import program, step

VERSIONS, SAMPLES, TOKENS = 4, 400, 8
LESSON = "zorblax quimtel vrandoo pelk zorblax quimtel vrandoo pelk"


def run(place: Place, *, samples: int = SAMPLES, steps: int = 5) -> list[Outcome]:
    """Pin ``samples`` to ``VERSIONS`` versions in turn, take ``steps`` while they are computed, and read them all."""
    with program(place) as service:
        # The engine scores prompts exactly where no adapter lies on the unembedding.
        training = service.create_lora_training_client(
            str(place.model), rank=place.rank, seed=1, train_unembed=False
        ).result()
        tokens = training.get_tokenizer().encode(LESSON)
        prompt = types.ModelInput.from_ints(tokens)
        data = [
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
            )
        ]
        pinned = [_version(training, data) for _ in range(VERSIONS)]
        alone = np.array([_scores(sampler.compute_logprobs(prompt).result()) for sampler in pinned])
        futures = [
            pinned[number % VERSIONS].sample(
                prompt, 1, types.SamplingParams(max_tokens=TOKENS, seed=number), include_prompt_logprobs=True
            )
            for number in range(samples)
        ]
        for _ in range(steps):
            step(training, data, 1e-4)
        waiting = sum(not future.future().done() for future in futures)
        newest = training.save_weights_and_get_sampling_client().result()
        answers = [future.result() for future in futures]
        after = _scores(newest.compute_logprobs(prompt).result())
    given = np.array([_scores(list(answer.prompt_logprobs or [])) for answer in answers])
    far = np.abs(given[:, None] - alone).mean(-1)  # from each answer to each version
    own = far[np.arange(samples), np.arange(samples) % VERSIONS]
    far[np.arange(samples), np.arange(samples) % VERSIONS] = np.inf
    assert len({answer.sequences[0].sequence_id for answer in answers}) == samples
    assert np.abs(after - alone).mean(-1).min() > own.max(), "training did not go on"
    return [
        Outcome(
            what=f"{samples} samples: to own version",
            before=float(own.max()),
            after=float(far.min()),
            bar="< half",
            learned=bool(2 * own.max() < far.min()),
        ),
        Outcome(
            what=f"still drawn after {steps} steps",
            before=float(samples),
            after=float(waiting),
            bar="> 0",
            learned=waiting > 0,
        ),
    ]


def _version(training: tinker.TrainingClient, data: list[types.Datum]) -> tinker.SamplingClient:
    for _ in range(3):
        step(training, data, 1e-3)
    return training.save_weights_and_get_sampling_client().result()


def _scores(logprobs: list[float | None]) -> np.ndarray:
    return np.array(logprobs[1:], dtype=np.float64)
