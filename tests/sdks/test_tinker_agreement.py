"""What the sampler says of its tokens is what the trainer computes, at every temperature: float32, default layers."""

import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
import torch
from tinker import types

from tests.stack import EngineEndpoint, running_stack
from tests.wire.tinker_clients import SDK_WARNINGS, sdk_is_collected

__all__ = ["sdk_is_collected"]

pytestmark = [pytest.mark.engine, *SDK_WARNINGS]

SEQUENCES, LENGTH, ALTERNATIVES = 20, 6, 4
PROMPT = [1000, 2000, 3000, 4000]


@pytest.fixture(scope="module")
def training(
    tiny_engine: EngineEndpoint, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tinker.TrainingClient]:
    """A model after three steps, with the SDK's default layers."""
    with running_stack(tiny_engine, tmp_path_factory.mktemp("agreement")) as stack:
        service = tinker.ServiceClient(base_url=f"{stack.url}/tinker", api_key=stack.key)
        training = service.create_lora_training_client(str(tiny_model), rank=8, seed=11).result()
        lesson = [5000, 6000, 7000, 8000, 9000]
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(lesson[:-1]),
            loss_fn_inputs={"target_tokens": lesson[1:], "weights": [1.0] * 4},
        )
        for _ in range(3):
            training.forward_backward([datum], "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=5e-3)).result()
        yield training
        service.close("success").result()


@pytest.fixture(scope="module")
def sampler(training: tinker.TrainingClient) -> tinker.SamplingClient:
    return training.save_weights_and_get_sampling_client().result()


def drawn(sampler: tinker.SamplingClient, temperature: float) -> list[types.SampledSequence]:
    params = types.SamplingParams(max_tokens=LENGTH, seed=7, temperature=temperature, stop=[])
    prompt = types.ModelInput.from_ints(PROMPT)
    answer = sampler.sample(prompt, SEQUENCES, params, topk_sample_logprobs=ALTERNATIVES).result()
    assert len({tuple(sequence.tokens) for sequence in answer.sequences}) > SEQUENCES // 2
    return list(answer.sequences)


def trained(training: tinker.TrainingClient, tokens: list[int], targets: torch.Tensor) -> torch.Tensor:
    """The trainer's log-probabilities ``[LENGTH, K]`` of ``targets`` in the place of the sampled tokens."""
    whole = [*PROMPT, *tokens][:-1]
    padded = torch.zeros(len(whole), targets.shape[1], dtype=torch.int64)
    padded[-LENGTH:] = targets
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(whole),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch(padded),
            "weights": types.TensorData.from_torch(torch.ones_like(padded, dtype=torch.float32)),
        },
    )
    output = training.forward([datum], "cross_entropy").result().loss_fn_outputs[0]
    return output["logprobs"].to_torch()[-LENGTH:]


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.0, 1.5])
def test_differences_between_alternatives_are_those_at_temperature_one_divided_by_the_temperature(
    training: tinker.TrainingClient, sampler: tinker.SamplingClient, temperature: float
) -> None:
    farthest = 0.0
    for sequence in drawn(sampler, temperature):
        rows = [row[:ALTERNATIVES] for row in sequence.topk_logprobs or [] if row]
        scaled = torch.tensor([[logprob for _, logprob in row] for row in rows])
        plain = trained(training, list(sequence.tokens), torch.tensor([[token for token, _ in row] for row in rows]))
        assert scaled.shape == plain.shape == (LENGTH, ALTERNATIVES)
        gaps = (scaled - scaled[:, :1]) - (plain - plain[:, :1]) / temperature
        farthest = max(farthest, float(gaps.abs().max()))
    assert farthest < 0.05


def test_sampled_tokens_at_temperature_one_have_the_log_probabilities_that_the_trainer_computes(
    training: tinker.TrainingClient, sampler: tinker.SamplingClient
) -> None:
    differences: list[float] = []
    for sequence in drawn(sampler, 1.0):
        computed = trained(training, list(sequence.tokens), torch.tensor(sequence.tokens).unsqueeze(1))[:, 0]
        differences += (computed - torch.tensor(list(sequence.logprobs or []))).abs().tolist()
    assert len(differences) == SEQUENCES * LENGTH
    assert statistics.mean(differences) < 1e-4
