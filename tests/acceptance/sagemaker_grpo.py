"""A GRPO loop in the shape of Amazon's GSM8K example, on single-digit addition: held-out answers get right.

K samples of each question in one request, all futures gathered, the ``ppo`` loss, a fresh sampler each step. The SDK
asks for at least 512 tokens, so stop strings end the answers. The suite leaves it to ``make sagemaker-acceptance``.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from sagemaker.train.training_session import (
    AdamParams,
    Datum,
    ModelInput,
    SampledSequence,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    TensorData,
    TensorDtype,
)

from tests.curves.tasks import addition, chat_prompt, reward
from tests.stack import Stack
from tests.wire.sagemaker_clients import SDK_WARNINGS, environment, service_client

pytestmark = [pytest.mark.engine, *SDK_WARNINGS]

STEPS, QUESTIONS, SAMPLES = 14, 8, 8
STOP = ["\n", ".", ",", "!", "?"]
CLIP = {"clip_low_threshold": 0.2, "clip_high_threshold": 5.0}


@pytest.fixture(scope="module")
def service(smollm_stack: Stack) -> Iterator[ServiceClient]:
    with environment(smollm_stack.url, smollm_stack.key):
        yield service_client()


def datum(prompt: Sequence[int], drawn: SampledSequence, advantage: float) -> Datum:
    """The answer's tokens are trained: position i of the input predicts target i."""
    tokens, before = [*prompt, *drawn.tokens], len(prompt) - 1
    silent, trained = [0.0] * before, len(drawn.tokens)
    return Datum(
        model_input=ModelInput.from_ints(tokens),
        loss_fn_inputs={
            "target_tokens": TensorData(data=[*tokens[1:], 0], dtype=TensorDtype.INT64),
            "weights": TensorData(data=[*silent, *[1.0] * trained, 0.0]),
            "logprobs": TensorData(data=[*silent, *drawn.logprobs, 0.0]),
            "advantages": TensorData(data=[*silent, *[advantage] * trained, 0.0]),
        },
    )


@pytest.mark.timeout(1700)
def test_held_out_sums_are_learned(service: ServiceClient, smollm_stack: Stack) -> None:
    pairs = list(itertools.product(range(1, 10), repeat=2))
    draw = random.Random(0)
    draw.shuffle(pairs)
    held_out, seen = pairs[:20], pairs[20:]

    with service.create_lora_training_client(smollm_stack.base_model, rank=8, alpha=32) as training:
        tokenizer = training.get_tokenizer()

        def answers(sampler: SamplingClient, questions: Sequence[tuple[int, int]], count: int, seed: int) -> list:
            prompts = [chat_prompt(tokenizer, addition(a, b)) for a, b in questions]
            params = SamplingParams(temperature=1.0, seed=seed, stop=STOP)
            futures = [sampler.sample(prompt, count, params) for prompt in prompts]
            return [(prompt, future.result().sequences) for prompt, future in zip(prompts, futures, strict=True)]

        def graded(questions: Sequence[tuple[int, int]], drawn: list) -> list[list[float]]:
            return [
                [reward(a, b, tokenizer.decode(one.tokens, skip_special_tokens=True)) for one in sequences]
                for (a, b), (_, sequences) in zip(questions, drawn, strict=True)
            ]

        def accuracy(sampler: SamplingClient) -> float:
            rewards = graded(held_out, answers(sampler, held_out, 4, 999))
            return sum(map(sum, rewards)) / (4 * len(held_out))

        sampler = training.save_weights_and_get_sampling_client()
        before = accuracy(sampler)
        for step in range(STEPS):
            questions = draw.sample(seen, QUESTIONS)
            drawn = answers(sampler, questions, SAMPLES, 1000 * step)
            batch = [
                datum(prompt, one, (got - sum(rewards) / len(rewards)) / (QUESTIONS * SAMPLES))
                for (prompt, sequences), rewards in zip(drawn, graded(questions, drawn), strict=True)
                for one, got in zip(sequences, rewards, strict=True)
            ]
            training.forward_backward(batch, "ppo", loss_fn_config=CLIP)
            training.optim_step(AdamParams(learning_rate=3e-4, beta2=0.95, weight_decay=0.0)).result()
            sampler = training.save_weights_and_get_sampling_client()
        after = accuracy(sampler)
    print(f"held-out accuracy {before:.2f} -> {after:.2f}")
    assert after >= before + 0.30, (before, after)


def test_a_hundred_gathered_samples_take_at_most_twice_what_the_engine_needs(
    service: ServiceClient, smollm_stack: Stack
) -> None:
    """The same hundred samples through the native surface, which answers each as soon as the engine has it."""
    prompts = [[1000 + index, 2000, 3000] for index in range(100)]

    def natively(prompt: list[int]) -> None:
        body = {"base_model": smollm_stack.base_model, "prompt": prompt, "max_tokens": 512, "seed": 1}
        assert native.post("/sample", json=body).status_code == 200

    async def gathered(sampler: SamplingClient) -> None:
        params = SamplingParams(seed=1)
        await asyncio.gather(*(sampler.sample_async(prompt, 1, params) for prompt in prompts))

    with smollm_stack.client(timeout_s=600) as native, ThreadPoolExecutor(100) as pool:
        started = time.perf_counter()
        list(pool.map(natively, prompts))
        engine_s = time.perf_counter() - started
    with service.create_sampling_client(base_model=smollm_stack.base_model) as sampler:
        started = time.perf_counter()
        asyncio.run(gathered(sampler))
        seconds = time.perf_counter() - started
    print(f"100 samples: {engine_s:.1f} s natively, {seconds:.1f} s by the SDK")
    assert seconds < 2 * engine_s
