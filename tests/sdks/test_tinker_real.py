"""The unmodified ``tinker`` SDK against the real gateway, the real trainer and vLLM, on the tiny float32 model."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.stack import EngineEndpoint, Stack, running_stack
from tests.wire.tinker_clients import SDK_WARNINGS, sdk_is_collected

__all__ = ["sdk_is_collected"]

pytestmark = [pytest.mark.engine, *SDK_WARNINGS]

TEXT = "zorblax quimtel vrandoo pelk zorblax quimtel vrandoo pelk"
STEP = types.AdamParams(learning_rate=2e-3)


@pytest.fixture(scope="module")
def stack(tiny_engine: EngineEndpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tiny_engine, tmp_path_factory.mktemp("tinker-stack")) as running:
        yield running


@pytest.fixture(scope="module")
def service(stack: Stack) -> Iterator[tinker.ServiceClient]:
    service = tinker.ServiceClient(base_url=f"{stack.url}/tinker", api_key=stack.key)
    yield service
    service.close("success").result()


def datum(tokens: Sequence[int], weight: float = 1.0) -> types.Datum:
    tokens = list(tokens)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [weight] * (len(tokens) - 1)},
    )


def scored(client: tinker.TrainingClient, tokens: Sequence[int]) -> np.ndarray:
    output = client.forward([datum(tokens)], "cross_entropy").result().loss_fn_outputs[0]
    return output["logprobs"].to_numpy()


def test_the_default_adapter_trains_samples_and_agrees_with_its_sampler(
    stack: Stack, service: tinker.ServiceClient, tiny_model: Path
) -> None:
    training = service.create_lora_training_client(str(tiny_model), rank=8, seed=7).result()
    tokens = training.get_tokenizer().encode(TEXT)
    losses = []
    for _ in range(4):
        losses.append(training.forward_backward([datum(tokens)], "cross_entropy"))
        training.optim_step(STEP)
    sampler = training.save_weights_and_get_sampling_client().result()
    values = [future.result().metrics["loss:sum"] for future in losses]
    assert values == sorted(values, reverse=True)
    assert values[-1] < values[0] - 1.0

    prompt = types.ModelInput.from_ints(tokens)
    params = types.SamplingParams(max_tokens=6, seed=5)
    answer = sampler.sample(prompt, 2, params, topk_sample_logprobs=3).result()
    assert answer.sequences[0].tokens != answer.sequences[1].tokens
    for sequence in answer.sequences:
        # The sampler's own scores at temperature 1 are the trainer's, adapter on the unembedding included.
        whole = [*tokens, *sequence.tokens]
        trained = scored(training, whole)[len(tokens) - 1 :]
        assert sequence.logprobs is not None
        assert np.abs(trained - np.array(sequence.logprobs)).max() < 1e-3
        assert sequence.topk_logprobs is not None
        assert all(len(row) == 3 and row[0][1] >= row[1][1] >= row[2][1] for row in sequence.topk_logprobs)


def test_scores_are_those_of_the_model_also_under_an_adapter_on_the_unembedding(
    service: tinker.ServiceClient, tiny_model: Path
) -> None:
    training = service.create_lora_training_client(str(tiny_model), rank=8, seed=3).result()
    tokens = [1000, 2000, 3000, 4000, 5000, 6000]
    training.forward_backward([datum(tokens)], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    sampler = training.save_weights_and_get_sampling_client().result()
    scores = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    assert scores[0] is None
    assert np.abs(scored(training, tokens) - np.array(scores[1:], dtype=np.float64)).max() < 1e-3

    ids = torch.full((len(tokens) - 1, 2), -1, dtype=torch.int64)
    ids[2, 0], ids[2, 1], ids[4, 0] = tokens[3], 77, tokens[5]
    answer = sampler.sample(
        types.ModelInput.from_ints(tokens),
        1,
        types.SamplingParams(max_tokens=1),
        topk_prompt_logprobs=20,
        target_prompt_logprobs=types.TensorData.from_torch(ids),
    ).result()
    assert answer.topk_prompt_logprobs is not None
    assert answer.topk_prompt_logprobs[0] is None
    for token, score, ranked in zip(tokens[1:], scores[1:], answer.topk_prompt_logprobs[1:], strict=True):
        assert ranked is not None
        assert len(ranked) == 20
        assert score is not None
        best = dict(ranked)
        assert best.get(token, score) == pytest.approx(score, abs=1e-3)
        assert token in best or score <= ranked[-1][1] + 1e-3
    assert answer.target_prompt_logprobs is not None
    targets = answer.target_prompt_logprobs.to_torch()
    assert targets[2, 0].item() == pytest.approx(scores[3], abs=1e-3)
    assert targets[4, 0].item() == pytest.approx(scores[5], abs=1e-3)
    assert targets[2, 1].item() < 0
    assert targets[0].tolist() == [0.0, 0.0]


def test_temperatures_scale_what_is_sampled(service: tinker.ServiceClient, stack: Stack) -> None:
    sampler = service.create_sampling_client(base_model=stack.base_model).result()
    prompt = [1000, 2000, 3000]
    for temperature in (0.5, 0.7, 1.5):
        params = types.SamplingParams(max_tokens=1, seed=1, temperature=temperature)
        drawn = sampler.sample(types.ModelInput.from_ints(prompt), 16, params).result().sequences
        first, second = (
            next(s for s in drawn if s.tokens[0] == token) for token in [*{s.tokens[0] for s in drawn}][:2]
        )
        plain = [
            sampler.compute_logprobs(types.ModelInput.from_ints([*prompt, s.tokens[0]])).result()[-1]
            for s in (first, second)
        ]
        assert first.logprobs is not None
        assert second.logprobs is not None
        assert plain[0] is not None
        assert plain[1] is not None
        difference = first.logprobs[0] - second.logprobs[0]
        assert difference == pytest.approx((plain[0] - plain[1]) / temperature, abs=0.05)


def test_a_resumed_run_is_the_uninterrupted_one(stack: Stack, tiny_model: Path) -> None:
    tokens = [1000, 2000, 3000, 4000, 5000]

    def step(client: tinker.TrainingClient) -> None:
        client.forward_backward([datum(tokens)], "cross_entropy")
        client.optim_step(STEP).result()

    def run(resume: bool) -> np.ndarray:
        service = tinker.ServiceClient(base_url=f"{stack.url}/tinker", api_key=stack.key)
        training = service.create_lora_training_client(stack.base_model, rank=8, seed=5).result()
        step(training)
        step(training)
        if resume:
            path = training.save_state("half").result().path
            service.close("interrupted").result()
            service = tinker.ServiceClient(base_url=f"{stack.url}/tinker", api_key=stack.key)
            training = service.create_training_client_from_state_with_optimizer(path).result()
        step(training)
        result = scored(training, tokens)
        service.close("success").result()
        return result

    assert run(resume=True).tolist() == run(resume=False).tolist()
