"""The pool in front of real vLLM on CPU with the tiny float32 model, against torch and PEFT in float32."""

import asyncio
import dataclasses
import math
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from billing.engines import parse_counters
from gateway.core.canary import CanaryMismatch
from gateway.core.catalog import BaseModel, Catalog
from gateway.core.counts import StreamCounts
from gateway.core.errors import GatewayError, Invalid, Unavailable
from gateway.core.ports import CorruptArtifact
from gateway.core.sampling import MAX_STOPS, SampleRequest, SamplingParams, StopReason, Target, TokenCounts
from gateway.core.versions import Version
from gateway.engines.answers import EngineLost
from gateway.engines.pool import EnginePool
from gateway.engines.vllm import Vllm
from gateway.store.artifacts import LocalArtifacts
from tests.engines.fixtures import EngineProcess, base_model_of, until
from tests.engines.reference import Reference
from tests.stack import EngineEndpoint

pytestmark = pytest.mark.engine

PROMPT = (504, 3575, 282, 4649, 314)
OTHER_PROMPT = (99, 1000, 45000, 7, 8, 9, 260, 2240)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def shared_artifacts(tmp_path_factory: pytest.TempPathFactory) -> LocalArtifacts:
    """Of the whole module: an engine may read what it loaded once until it ends."""
    return LocalArtifacts(tmp_path_factory.mktemp("artifacts"))


@pytest.fixture(scope="module")
def reference(tiny_model: Path, shared_artifacts: LocalArtifacts) -> Reference:
    return Reference(tiny_model, shared_artifacts, base_model="tiny")


@pytest.fixture
def base(tiny_engine: EngineEndpoint) -> BaseModel:
    return base_model_of(tiny_engine)


@pytest.fixture
async def pool(
    tiny_engine: EngineEndpoint, base: BaseModel, shared_artifacts: LocalArtifacts
) -> AsyncIterator[EnginePool]:
    catalog = Catalog(models={base.name: base})
    async with EnginePool(catalog, shared_artifacts, key=tiny_engine.key, timeout_s=120) as opened:
        yield opened


@pytest.fixture
async def client(tiny_engine: EngineEndpoint) -> AsyncIterator[Vllm]:
    async with Vllm(tiny_engine.url, key=tiny_engine.key, timeout_s=30) as opened:
        yield opened


def greedy(prompt: tuple[int, ...] = PROMPT, *, scored: bool = False, count: int = 12) -> SampleRequest:
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    return SampleRequest(prompt=prompt, params=params, prompt_logprobs=scored)


def drawn(prompt: tuple[int, ...] = PROMPT, *, count: int = 4) -> SampleRequest:
    params = SamplingParams(max_tokens=16, seed=11, ignore_eos=True)
    return SampleRequest(prompt=prompt, num_samples=count, params=params)


def worst(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


async def running(client: Vllm) -> float:
    found = re.findall(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} (\S+)$", await client.metrics(), re.MULTILINE)
    assert found
    return sum(float(value) for value in found)


async def busy(client: Vllm) -> bool:
    return await running(client) > 0


async def idle(client: Vllm) -> bool:
    return await running(client) == 0


async def test_without_its_key_an_engine_says_how_it_is_and_does_nothing(tiny_engine: EngineEndpoint) -> None:
    async with httpx.AsyncClient(base_url=tiny_engine.url, trust_env=False) as anybody:
        asked = {"Authorization": f"Bearer {tiny_engine.key}"}
        paths: dict[str, dict[str, Any]] = (await anybody.get("/openapi.json", headers=asked)).json()["paths"]
        routes = [(path, method.upper()) for path, methods in paths.items() for method in methods]
        for wrong in ({}, {"Authorization": "Bearer x"}, {"Authorization": tiny_engine.key}):
            answers = {
                path: (await anybody.request(method, path.replace("{response_id}", "r"), headers=wrong)).status_code
                for path, method in [*routes, ("/openapi.json", "GET"), ("/docs", "GET")]
            }
            assert {path for path, status in answers.items() if status != 401} == {"/health", "/metrics"}
    assert {"/invocations", "/tokenize", "/v1/chat/completions"} <= {path for path, _ in routes}


@pytest.mark.parametrize("unembed", [False, True], ids=["projections", "lm_head too"])
async def test_sampled_logprobs_equal_the_reference(
    pool: EnginePool, base: BaseModel, reference: Reference, unembed: bool
) -> None:
    version = reference.adapter(1, unembed=unembed)

    report = await pool.publish(version)
    generation = await pool.generate(Target(base=base, version=version), drawn())

    assert report.max_difference < TOLERANCE
    assert report.base_mean_difference > 0.05
    assert not report.inconclusive
    for sequence in generation.sequences:
        expected = reference.of(version, (*PROMPT, *sequence.tokens))[len(PROMPT) - 1 :]
        assert worst(list(sequence.logprobs), expected) < TOLERANCE
    assert len({sequence.tokens for sequence in generation.sequences}) == 4


async def test_base_and_adapters_mixed_in_one_batch_answer_as_alone(
    pool: EnginePool, base: BaseModel, reference: Reference
) -> None:
    versions = [None, reference.adapter(2), None, reference.adapter(3, rank=4, unembed=True)]
    targets = [Target(base=base, version=version) for version in versions]
    asked = [(target, greedy(prompt)) for target in targets for prompt in (PROMPT, OTHER_PROMPT)]

    alone = [await pool.generate(*one) for one in asked]
    mixed = await asyncio.gather(*(pool.generate(*one) for one in asked * 4))

    for index, generation in enumerate(mixed):
        (sequence,), (expected,) = generation.sequences, alone[index % len(asked)].sequences
        assert sequence.tokens == expected.tokens
        assert worst(list(sequence.logprobs), list(expected.logprobs)) < TOLERANCE
    assert len({generation.sequences[0].tokens for generation in alone[::2]}) == 3


async def test_prompt_logprobs_of_concurrent_sequences_are_exact_with_lm_head_adapters(
    pool: EnginePool, base: BaseModel, reference: Reference
) -> None:
    versions = [reference.adapter(4, unembed=True), reference.adapter(5), None]
    prompts = [tuple(range(start, start + 40)) for start in (1000, 2000, 3000)]

    generations = await asyncio.gather(
        *(
            pool.generate(Target(base=base, version=version), greedy(prompt, scored=True, count=2))
            for version in versions
            for prompt in prompts
        )
    )

    for number, generation in enumerate(generations):
        version, prompt = versions[number // 3], prompts[number % 3]
        assert generation.prompt_logprobs is not None
        assert generation.prompt_logprobs[0] is None
        expected = reference.scores(prompt, None) if version is None else reference.of(version, prompt)
        ours = [math.nan if logprob is None else logprob for logprob in generation.prompt_logprobs[1:]]
        assert worst(ours, expected) < TOLERANCE


async def test_scoring_by_generating_equals_prompt_scores(client: Vllm, pool: EnginePool, reference: Reference) -> None:
    """What an engine without exact prompt scores falls back to."""
    version = reference.adapter(6, unembed=True)
    await pool.publish(version)
    tokens = tuple(range(500, 600))

    counted: list[TokenCounts] = []
    scores = await client.score_by_generating(version.id, tokens, counted.append)

    assert sum(counts.extra_sampled for counts in counted) == len(tokens) - 1
    assert client.exact_prompt_scores
    assert worst([math.nan if score is None else score for score in scores], reference.of(version, tokens)) < TOLERANCE


async def test_top_prompt_logprobs_are_the_most_likely_tokens(pool: EnginePool, base: BaseModel) -> None:
    request = dataclasses.replace(greedy(), topk_prompt_logprobs=5, prompt_logprobs=True)

    generation = await pool.generate(Target(base=base, version=None), request)

    assert generation.topk_prompt_logprobs is not None
    assert [None if entry is None else len(entry) for entry in generation.topk_prompt_logprobs] == [None, 5, 5, 5, 5]
    for entry in generation.topk_prompt_logprobs[1:]:
        assert entry is not None
        assert list(entry.values()) == sorted(entry.values(), reverse=True)


async def test_processed_logprobs_belong_to_the_distribution_sampled_from(
    pool: EnginePool, base: BaseModel, reference: Reference
) -> None:
    version = reference.adapter(1)
    params = SamplingParams(max_tokens=6, temperature=0.5, seed=1, ignore_eos=True)

    (sequence,) = (
        await pool.generate(Target(base=base, version=version), SampleRequest(prompt=PROMPT, params=params))
    ).sequences

    logprobs = reference.full(version, (*PROMPT, *sequence.tokens))[len(PROMPT) - 1 : -1]
    halved = (logprobs / 0.5).log_softmax(-1)
    expected = [float(row[token]) for row, token in zip(halved, sequence.tokens, strict=True)]
    assert worst(list(sequence.logprobs), expected) < TOLERANCE


def renamed(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Keys of another architecture: vLLM refuses or, worse, binds nothing and answers as base."""
    return {key.replace(".layers.", ".blocks."): tensor for key, tensor in tensors.items()}


def swapped_layers(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    other = {"0": "1", "1": "0"}
    return {re.sub(r"layers\.(\d)", lambda m: f"layers.{other[m[1]]}", key): tensor for key, tensor in tensors.items()}


def with_nan(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    spoiled = dict(tensors)
    first = next(key for key in spoiled if "lora_B" in key)
    spoiled[first] = spoiled[first].clone()
    spoiled[first][0, 0] = math.nan
    return spoiled


def scaled(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    return {key: tensor * 2 if "lora_B" in key else tensor for key, tensor in tensors.items()}


def without_one_b(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    dropped = next(key for key in tensors if "lora_B" in key)
    return {key: tensor for key, tensor in tensors.items() if key != dropped}


@pytest.mark.parametrize(
    ("spoil", "refusal"),
    [
        (renamed, CanaryMismatch),
        (swapped_layers, CanaryMismatch),
        (scaled, CanaryMismatch),
        (with_nan, CorruptArtifact),  # found by reading, before the engine sees it
        (without_one_b, CorruptArtifact),
    ],
    ids=lambda it: it.__name__,
)
async def test_an_adapter_that_is_not_what_was_trained_is_rejected_and_unloaded(
    pool: EnginePool,
    base: BaseModel,
    reference: Reference,
    client: Vllm,
    spoil: object,
    refusal: type[GatewayError],
) -> None:
    version = reference.adapter(7, spoil=spoil)  # pyright: ignore[reportArgumentType]

    with pytest.raises(refusal):
        await pool.publish(version)

    assert version.id not in await client.models()
    good = await pool.generate(Target(base=base, version=reference.adapter(7)), greedy())
    assert len(good.sequences[0].tokens) == 12


async def test_more_versions_than_slots_are_all_served_correctly(
    pool: EnginePool, base: BaseModel, reference: Reference
) -> None:
    versions = [reference.adapter(seed, rank=4) for seed in range(20, 28)]
    targets = [Target(base=base, version=version) for version in (*versions, None) for _ in range(3)]

    generations = await asyncio.gather(*(pool.generate(target, drawn(count=2)) for target in targets))

    for target, generation in zip(targets, generations, strict=True):
        for sequence in generation.sequences:
            whole = (*PROMPT, *sequence.tokens)
            version = target.version
            expected = reference.scores(whole, None) if version is None else reference.of(version, whole)
            assert worst(list(sequence.logprobs), expected[len(PROMPT) - 1 :]) < TOLERANCE


async def test_closing_a_stream_frees_the_engine(pool: EnginePool, base: BaseModel, client: Vllm) -> None:
    body = {"prompt": list(PROMPT), "max_tokens": 1000, "ignore_eos": True}
    target = Target(base=base, version=None)
    async with aclosing(pool.stream(target, "completions", body, asyncio.Event())) as chunks:
        async for chunk in chunks:
            assert chunk.document["usage"]["prompt_tokens"] == len(PROMPT)
            break
        assert await running(client) == 1
    await until(lambda: idle(client))


@pytest.mark.parametrize(
    ("route", "asked", "samples"),
    [
        ("completions", {"prompt": list(PROMPT)}, 1),
        ("completions", {"prompt": [list(PROMPT), list(PROMPT[:4])], "n": 3, "seed": 1}, 3),
        ("chat/completions", {"messages": [{"role": "user", "content": "hello"}]}, 1),
    ],
)
async def test_a_stopped_stream_loses_no_token_of_the_engines_count(
    pool: EnginePool, base: BaseModel, client: Vllm, route: str, asked: dict[str, Any], samples: int
) -> None:
    target = Target(base=base, version=None)
    prompts = (len(PROMPT), 4)[: len(asked.get("prompt", [0])) if samples > 1 else 1]
    if route != "completions":
        prompts = (len(await pool.tokenize(target, asked)),)
    counted, stop, seen = StreamCounts(prompts, samples), asyncio.Event(), 0
    await until(lambda: idle(client))
    before = await totals(client)
    async for chunk in pool.stream(target, route, {**asked, "max_tokens": 800, "ignore_eos": True}, stop):
        counted.observe(chunk.engine, chunk.document)
        seen += 1
        if seen == 9:
            stop.set()
    await until(lambda: idle(client))

    counts = counted.counts()
    assert counts is not None
    assert counts.sampled < 800
    now = await totals(client)
    assert (now[0] - before[0], now[1] - before[1]) == (counts.prompt + counts.extra_prompt, counts.sampled)


async def totals(client: Vllm) -> tuple[int, int]:
    counters = parse_counters(await client.metrics())
    assert counters is not None
    return counters.prompt_tokens, counters.generation_tokens


async def test_cancelling_a_request_frees_the_engine(pool: EnginePool, base: BaseModel, client: Vllm) -> None:
    asked = asyncio.create_task(pool.generate(Target(base=base, version=None), greedy(count=1000)))
    await until(lambda: busy(client))
    asked.cancel()
    await until(lambda: idle(client))
    assert asked.cancelled()


async def test_a_chat_is_answered_and_streamed_alike(pool: EnginePool, base: BaseModel, reference: Reference) -> None:
    target = Target(base=base, version=reference.adapter(1))
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "temperature": 0}

    whole = (await pool.complete(target, "chat/completions", body)).document
    stream = pool.stream(target, "chat/completions", body, asyncio.Event())
    chunks = [chunk.document async for chunk in stream]

    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["choices"] == []
    counts = ("prompt_tokens", "completion_tokens")
    assert [chunks[-1]["usage"][name] for name in counts] == [whole["usage"][name] for name in counts]
    assert len(await pool.tokenize(target, body)) == whole["usage"]["prompt_tokens"]


async def test_what_the_engine_refuses_is_the_callers_fault_and_names_the_limit(
    pool: EnginePool, base: BaseModel
) -> None:
    target = Target(base=base, version=None)

    with pytest.raises(Invalid) as too_long:
        await pool.complete(target, "completions", {"prompt": [5] * 1100, "max_tokens": 100})
    with pytest.raises(Invalid):
        await pool.complete(target, "completions", {"prompt": "a", "temperature": -1})

    assert too_long.value.code == "context_length_exceeded"
    assert "1024" in too_long.value.message


async def test_as_many_stop_strings_as_the_core_allows_are_taken(pool: EnginePool, base: BaseModel) -> None:
    """Stock vLLM takes four."""
    target, stops = Target(base=base, version=None), tuple(f"no such text {n}" for n in range(MAX_STOPS))
    request = dataclasses.replace(greedy(), params=dataclasses.replace(greedy().params, stop=stops))
    assert (await pool.generate(target, request)).sequences == (await pool.generate(target, greedy())).sequences
    body = {"prompt": list(PROMPT), "max_tokens": 2, "stop": list(stops)}
    assert (await pool.complete(target, "completions", body)).document["choices"]


async def test_stop_strings_and_ids_end_a_sequence_and_belong_to_it(pool: EnginePool, base: BaseModel) -> None:
    target = Target(base=base, version=None)
    (plain,) = (await pool.generate(target, greedy())).sequences
    end = plain.tokens.index(plain.tokens[3]) + 1
    body = {"prompt": list(PROMPT), "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    text: str = (await pool.complete(target, "completions", body)).document["choices"][0]["text"]
    word = re.findall(r"[A-Za-z]{3,}", text)[1]

    by_id, by_word = [
        (await pool.generate(target, dataclasses.replace(greedy(), params=params))).sequences[0]
        for params in (
            dataclasses.replace(greedy().params, stop_token_ids=(plain.tokens[3],)),
            dataclasses.replace(greedy().params, stop=(word,)),
        )
    ]

    assert (by_id.tokens, by_id.stop_reason) == (plain.tokens[:end], StopReason.STOP)
    assert by_word.stop_reason is StopReason.STOP
    assert 1 < len(by_word.tokens) < 12
    assert by_word.tokens == plain.tokens[: len(by_word.tokens)]


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_versions_come_back_through_the_gate_after_the_engine_was_killed(
    tiny_process: tuple[EngineProcess, EngineEndpoint],
    pool: EnginePool,
    base: BaseModel,
    reference: Reference,
    client: Vllm,
) -> None:
    process, _ = tiny_process
    versions: list[Version] = [reference.adapter(30), reference.adapter(31, unembed=True)]
    targets = [Target(base=base, version=version) for version in versions]
    before = [await pool.generate(target, greedy()) for target in targets]
    midway = [asyncio.create_task(pool.generate(target, greedy(count=1000))) for target in targets]
    await until(lambda: busy(client))

    process.kill()
    outcomes = await asyncio.gather(*midway, return_exceptions=True)
    with pytest.raises(Unavailable):
        await pool.generate(targets[0], greedy())
    process.start()

    assert [type(outcome) for outcome in outcomes] == [EngineLost, EngineLost]  # never a short answer

    after = [await pool.generate(target, greedy()) for target in targets]
    assert [one.sequences[0].tokens for one in after] == [one.sequences[0].tokens for one in before]
    (health,) = await pool.health(base)
    assert (health.ready, health.adapters) == (True, 2)
