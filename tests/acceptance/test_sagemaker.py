"""The unmodified SageMaker SDK on real parts: gateway, trainer and vLLM, on the tiny float32 model."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from sagemaker.train.training_session import (
    AdamParams,
    Datum,
    ModelInput,
    SamplingParams,
    ServiceClient,
    TensorData,
    TensorDtype,
    TrainingClient,
)
from tinker import types

from tests.stack import Stack
from tests.wire.sagemaker_clients import SDK_WARNINGS, environment, service_client
from tests.wire.tinker_clients import SDK_WARNINGS as TINKER_WARNINGS
from tests.wire.tinker_clients import sdk_is_collected

__all__ = ["sdk_is_collected"]

pytestmark = [pytest.mark.engine, *SDK_WARNINGS, *TINKER_WARNINGS]

TOKENS = [1000, 2000, 3000, 4000, 5000, 6000]
STEP = AdamParams(learning_rate=2e-3)
STOP = SamplingParams(seed=5, stop=["a", "e"])


@pytest.fixture(scope="module")
def service(tiny_stack: Stack) -> Iterator[ServiceClient]:
    with environment(tiny_stack.url, tiny_stack.key):
        yield service_client()


def datum(tokens: Sequence[int], weight: float = 1.0, **inputs: Sequence[float]) -> Datum:
    """Every array has the input's length; the last position is masked."""
    tokens = list(tokens)
    return Datum(
        model_input=ModelInput.from_ints(tokens),
        loss_fn_inputs={
            "target_tokens": TensorData(data=[*tokens[1:], 0], dtype=TensorDtype.INT64),
            "weights": TensorData(data=[weight] * (len(tokens) - 1) + [0.0]),
            **{name: TensorData(data=list(values)) for name, values in inputs.items()},
        },
    )


def step(training: TrainingClient, tokens: Sequence[int] = TOKENS) -> float:
    future = training.forward_backward([datum(tokens)])
    training.optim_step(STEP).result()
    return future.result().metrics["loss"]


def scored(training: TrainingClient, tokens: Sequence[int] = TOKENS) -> list[float]:
    """Return the trainer's log-probabilities of ``tokens[1:]``."""
    return training.forward([datum(tokens)]).result().loss_fn_outputs[0]["logprobs"]["data"][:-1]


def open_session(service: ServiceClient, model: str, **options: Any) -> TrainingClient:
    return service.create_lora_training_client(model, rank=8, alpha=16, **options)


def test_the_client_tour(service: ServiceClient, tiny_stack: Stack, tiny_model: Path) -> None:
    model = tiny_stack.base_model
    assert service.list_base_models() == [str(tiny_model)]  # a directory here: nothing is looked up elsewhere
    name = f"tour-{time.time_ns()}"
    with open_session(service, str(tiny_model), training_session_name=name) as training:
        losses = [step(training) for _ in range(4)]
        assert losses == sorted(losses, reverse=True)
        sampler = training.save_weights_and_get_sampling_client("tour")
        answer = sampler.sample(TOKENS, 2, STOP, include_prompt_logprobs=True, topk_prompt_logprobs=3).result()
        scores = sampler.compute_logprobs(TOKENS).result()
        assert answer.sequences[0].tokens != answer.sequences[1].tokens
        assert np.abs(np.array(scores[1:]) - scored(training)).max() < 1e-3
        assert np.abs(np.array(answer.prompt_logprobs[1:]) - scores[1:]).max() < 1e-3
        assert [len(row) >= 3 for row in answer.topk_prompt_logprobs] == [False] + [True] * (len(TOKENS) - 1)
        for sequence in answer.sequences:
            whole = [*TOKENS, *sequence.tokens]
            assert np.abs(np.array(sequence.logprobs) - scored(training, whole)[len(TOKENS) - 1 :]).max() < 1e-3
        assert training.get_tokenizer().encode("a b") == sampler.get_tokenizer().encode("a b")
        sampler.stop()

        merged = training.save_weights_for_sampler("merged", merge_weights=True).result().model_package_arn
        state = training.save_state("half way").result().model_package_arn
        kept = scored(training)
        step(training)
        expected = scored(training)
        training.load_state(state).result()
        assert scored(training) == kept
        kinds = {one.model_package_arn: one.kind for one in training.list_model_packages(kind="checkpoint")}
        assert state in kinds
        assert merged not in kinds

    with service.create_training_client_from_state_with_optimizer(state) as resumed:  # asks for rank 32
        step(resumed)
        assert scored(resumed) == expected  # to the bit
    assert asyncio.run(_async_tour(service, model)) < 0
    other = open_session(service, model)
    other.stop()
    other.stop()
    other.delete()
    service.delete_session(name)
    service.delete_model_package(merged)
    assert service.list_sessions(name_contains=name) == []


async def _async_tour(service: ServiceClient, model: str) -> float:
    sampler = await service.create_sampling_client_async(base_model=model)
    answer = await sampler.sample_async(TOKENS, 1, STOP)
    assert answer.sequences[0].tokens
    scores = await sampler.compute_logprobs_async(TOKENS)
    sampler.stop()
    assert scores[1] is not None
    return scores[1]


def test_losses_follow_this_dialects_conventions(service: ServiceClient, tiny_stack: Stack) -> None:
    """All arrays have the input's length, weights are a mask, the clip thresholds bound the ratio itself."""
    with open_session(service, tiny_stack.base_model) as training:
        new = np.array(scored(training))
        old = new - np.log([0.1, 0.5, 1.0, 3.0, 9.0])  # so the ratios are these
        advantages = np.array([-1.0, 1.0, 2.0, 1.0, 1.0])

        def loss(name: str, **config: float) -> float:
            batch = [datum(TOKENS, logprobs=[*old, 0.0], advantages=[*advantages, 7.0])]
            return training.forward(batch, name, loss_fn_config=config or None).result().metrics["loss"]

        ratio = np.exp(new - old)
        clipped = np.clip(ratio, 0.2, 5.0)
        thresholds = {"clip_low_threshold": 0.2, "clip_high_threshold": 5.0}
        assert loss("importance_sampling") == pytest.approx(-(ratio * advantages).sum(), rel=1e-4)
        assert loss("ppo", **thresholds) == pytest.approx(
            -np.minimum(ratio * advantages, clipped * advantages).sum(), rel=1e-4
        )
        assert loss("cispo", **thresholds) == pytest.approx(-(clipped * new * advantages).sum(), rel=1e-4)
        warm = training.forward([datum(TOKENS, temperature=[2.0] * len(TOKENS))]).result()
        assert warm.metrics["loss"] != pytest.approx(-new.sum(), rel=1e-3)
        told = (
            training.forward(
                [datum(TOKENS, logprobs=[*old, 0.0], advantages=[*advantages, 0.0], ref_log_prob=[*new, 0.0])], "ppo"
            )
            .result()
            .metrics
        )
        assert told["kl_ref"] == pytest.approx(0.0, abs=1e-5)


def test_three_parts_of_a_batch_step_as_its_sum_does(service: ServiceClient, tiny_stack: Stack) -> None:
    """2,500 datums come as three operations; one datum weighted 2,500 times has the same gradient."""
    tokens, norms = TOKENS[:2], []
    with open_session(service, tiny_stack.base_model) as training:
        for batch in ([datum(tokens)] * 2500, [datum(tokens, 2500.0)]):
            first = training.current_sequence_number
            training.forward_backward(batch)
            assert training.current_sequence_number - first == (3 if len(batch) > 1 else 1)
            zero = AdamParams(learning_rate=1e-12, weight_decay=0.0)
            norms.append(training.optim_step(zero).result().metrics["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_a_tinker_client_samples_what_was_saved_here(service: ServiceClient, tiny_stack: Stack) -> None:
    with open_session(service, tiny_stack.base_model) as training:
        step(training)
        sampler = training.save_weights_and_get_sampling_client()
        expected = sampler.compute_logprobs(TOKENS).result()
        with tiny_stack.client() as native:
            [session] = [one for one in native.get("/sessions").json()["data"] if one["status"] == "running"][:1]
            path = f"tinker://{session['id']}/sampler_weights/{session['latest_version_id']}"
        other = tinker.ServiceClient(base_url=f"{tiny_stack.url}/tinker", api_key=tiny_stack.key)
        scores = (
            other.create_sampling_client(model_path=path).result().compute_logprobs(types.ModelInput.from_ints(TOKENS))
        )
        assert scores.result()[1:] == pytest.approx(expected[1:], abs=1e-6)
        other.close("success").result()
