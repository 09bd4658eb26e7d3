"""Many samples at once from one process, while the model that they were pinned from goes on training."""

import tinker
from tinker import types

from tests.wire.gateways import Gateway
from tests.wire.tinker_clients import (
    SDK_WARNINGS,
    datum,
    model_input,
    sdk_is_collected,
    tinker_service,
    training_client,
)

__all__ = ["sdk_is_collected"]

pytestmark = SDK_WARNINGS

VERSIONS, SAMPLES = 4, 400
PROMPT = model_input([97, 98, 99, 100])


def test_four_hundred_samples_at_once_are_each_answered_by_the_version_they_were_pinned_to(gateway: Gateway) -> None:
    with tinker_service(gateway) as service:
        training = training_client(service, train_unembed=False)
        samplers, alone = [], []
        for _ in range(VERSIONS):
            step(training)
            samplers.append(training.save_weights_and_get_sampling_client().result())
            alone.append(samplers[-1].compute_logprobs(PROMPT).result())
        assert len({tuple(scores) for scores in alone}) == VERSIONS

        drawn = [
            samplers[number % VERSIONS].sample(
                PROMPT, 1, types.SamplingParams(max_tokens=4, seed=number), include_prompt_logprobs=True
            )
            for number in range(SAMPLES)
        ]
        losses = [step(training) for _ in range(5)]
        newest = training.save_weights_and_get_sampling_client().result()
        answers = [future.result() for future in drawn]

        assert [answer.prompt_logprobs for answer in answers] == [alone[n % VERSIONS] for n in range(SAMPLES)]
        assert len({answer.sequences[0].sequence_id for answer in answers}) == SAMPLES
        assert losses == sorted(losses, reverse=True)
        assert newest.compute_logprobs(PROMPT).result() not in alone


def step(training: tinker.TrainingClient) -> float:
    """Take a step; return the loss before it."""
    batch = training.forward_backward([datum()], "cross_entropy")
    training.optim_step(types.AdamParams()).result()
    return batch.result().metrics["loss:sum"]
