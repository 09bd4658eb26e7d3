"""The pool in front of a real (scripted) engine process: the gate, the answers, what is refused."""

import asyncio
import dataclasses
import re
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import pytest

from gateway.core.canary import Canary, CanaryMismatch
from gateway.core.catalog import BaseModel, Catalog
from gateway.core.counts import StreamCounts
from gateway.core.errors import Conflict, Invalid, Unavailable
from gateway.core.ports import CorruptArtifact
from gateway.core.sampling import SampleRequest, SamplingParams, StopReason, Target
from gateway.core.scripted import BASE_FINGERPRINT, SCRIPTED_NAME, scripted_file, scripted_logprob, scripted_scores
from gateway.core.versions import Check, Version
from gateway.engines.launch import launch_scripted
from gateway.engines.pool import EnginePool
from gateway.engines.vllm import Vllm
from gateway.store.artifacts import LocalArtifacts
from tests.engines.artifacts import SEQUENCE, make_lora, rejected, stage, stage_scripted
from tests.engines.fixtures import EngineProcess, base_model_of, running_engine, scripted_spec, until
from tests.stack import EngineEndpoint

PROMPT = SEQUENCE


def ask(count: int = 1, **params: object) -> SampleRequest:
    return SampleRequest(
        prompt=PROMPT,
        num_samples=count,
        params=SamplingParams(**{"max_tokens": 8, "seed": 3, "ignore_eos": True, **params}),  # pyright: ignore[reportArgumentType]
    )


async def metric(client: Vllm, name: str) -> float:
    found = re.search(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", await client.metrics(), re.MULTILINE)
    assert found is not None
    return float(found[1])


async def test_a_published_version_answers_with_its_own_logprobs(
    pool: EnginePool, artifacts: LocalArtifacts, base: BaseModel
) -> None:
    version = stage_scripted(artifacts, "mine")

    report = await pool.publish(version)
    generation = await pool.generate(Target(base=base, version=version), ask())

    assert (report.max_difference, report.inconclusive) == (0.0, False)
    (sequence,) = generation.sequences
    assert sequence.stop_reason is StopReason.LENGTH
    pairs = zip((PROMPT[-1], *sequence.tokens), sequence.tokens, sequence.logprobs, strict=False)
    assert all(logprob == scripted_logprob("mine", previous, token) for previous, token, logprob in pairs)
    assert (generation.counts.prompt, generation.counts.cached, generation.counts.sampled) == (len(PROMPT), 0, 8)


async def test_a_version_that_computes_something_else_is_rejected_with_both_numbers(
    pool: EnginePool, artifacts: LocalArtifacts, base: BaseModel
) -> None:
    version = stage_scripted(artifacts, "mine", scored_as="another")

    with pytest.raises(CanaryMismatch) as refusal:
        await pool.publish(version)

    assert refusal.value.details["max"] > refusal.value.details["allowed_max"]
    with pytest.raises(Conflict) as refused:
        await pool.generate(Target(base=base, version=version), ask())
    assert refused.value.code == "version_failed_check"


async def test_a_version_that_answers_like_the_base_model_is_rejected(
    pool: EnginePool, artifacts: LocalArtifacts
) -> None:
    with pytest.raises(CanaryMismatch):
        await pool.publish(stage_scripted(artifacts, BASE_FINGERPRINT, scored_as="trained"))


async def test_a_version_equal_to_base_is_published_as_inconclusive(
    pool: EnginePool, artifacts: LocalArtifacts
) -> None:
    assert (await pool.publish(stage_scripted(artifacts, BASE_FINGERPRINT))).inconclusive


async def test_a_changed_file_is_found_before_the_engine_sees_it(
    pool: EnginePool, artifacts: LocalArtifacts, scripted_engine: EngineEndpoint
) -> None:
    version = stage_scripted(artifacts, "mine")
    (artifacts.path(version.location) / SCRIPTED_NAME).write_bytes(scripted_file("theirs"))

    with pytest.raises(CorruptArtifact, match=re.escape(SCRIPTED_NAME)):
        await pool.publish(version)

    async with Vllm(scripted_engine.url, key=scripted_engine.key, timeout_s=5) as client:
        assert version.id not in await client.models()


async def test_a_canary_outside_the_vocabulary_never_reaches_the_engine(
    pool: EnginePool, artifacts: LocalArtifacts
) -> None:
    with pytest.raises(CorruptArtifact, match="canary"):
        await pool.publish(stage_scripted(artifacts, "mine", tokens=[(1, 2, 999)]))


@pytest.mark.parametrize("files", [{"readme.txt": b"no adapter"}, {SCRIPTED_NAME: b"not json"}], ids=["404", "500"])
async def test_an_adapter_the_engine_cannot_load_is_rejected_once_the_base_model_was_seen_to_work(
    pool: EnginePool, artifacts: LocalArtifacts, base: BaseModel, files: dict[str, bytes]
) -> None:
    canary = Canary(tokens=(SEQUENCE,), logprobs=((-1.0,) * 5,), base_logprobs=((-1.5,) * 5,))
    version = stage(artifacts, files, canary, base_model=base.name, lora=make_lora())

    with pytest.raises(CanaryMismatch) as refusal:
        await pool.publish(version)

    assert refusal.value.code == "engine_refused_adapter"


@pytest.mark.parametrize(
    "canary",
    [
        None,
        Canary(tokens=((97,),), logprobs=((),), base_logprobs=((),)),
        Canary(tokens=(SEQUENCE,), logprobs=((-1.0,),), base_logprobs=((-1.5,) * 5,)),
        Canary(tokens=(SEQUENCE,), logprobs=((-1.0,) * 5,), base_logprobs=()),
    ],
    ids=["none", "too short", "lengths differ", "counts differ"],
)
async def test_a_version_that_nothing_can_be_judged_by_is_corrupt(
    pool: EnginePool, artifacts: LocalArtifacts, base: BaseModel, canary: Canary | None
) -> None:
    files = {SCRIPTED_NAME: scripted_file("mine")}
    version = stage(artifacts, files, canary, base_model=base.name, lora=make_lora())

    with pytest.raises(CorruptArtifact, match="canary"):
        await pool.publish(version)


async def test_a_rejected_version_and_a_strangers_model_are_refused(
    pool: EnginePool, artifacts: LocalArtifacts, base: BaseModel
) -> None:
    version = stage_scripted(artifacts, "mine")

    with pytest.raises(Invalid, match="rejected"):
        await pool.generate(Target(base=base, version=rejected(version)), ask())
    with pytest.raises(Invalid, match="no adapter of"):
        await pool.generate(Target(base=base, version=dataclasses.replace(version, base_model="other")), ask())


async def test_seeded_samples_differ_from_each_other_and_repeat(pool: EnginePool, base_target: Target) -> None:
    first = await pool.generate(base_target, ask(4))
    again = await pool.generate(base_target, ask(4))
    shifted = await pool.generate(base_target, ask(1, seed=4))

    assert len({sequence.tokens for sequence in first.sequences}) == 4
    assert again == first
    assert shifted.sequences[0] == first.sequences[1]  # sample i is drawn with seed + i


async def test_prompt_logprobs_have_the_prompts_length_and_none_first(pool: EnginePool, base_target: Target) -> None:
    request = dataclasses.replace(ask(), prompt_logprobs=True, topk_prompt_logprobs=3)

    generation = await pool.generate(base_target, request)

    assert generation.prompt_logprobs == (None, *scripted_scores(BASE_FINGERPRINT, PROMPT))
    assert generation.topk_prompt_logprobs is not None
    assert [None if entry is None else len(entry) for entry in generation.topk_prompt_logprobs] == [None, *[3] * 5]


async def test_stop_strings_and_ids_end_a_sequence_and_belong_to_it(pool: EnginePool, base_target: Target) -> None:
    (plain,) = (await pool.generate(base_target, ask(max_tokens=20))).sequences
    third = plain.tokens[2]
    end = plain.tokens.index(third) + 1

    for params in ({"stop_token_ids": (third,)}, {"stop": (chr(third),)}):
        (stopped,) = (await pool.generate(base_target, ask(max_tokens=20, **params))).sequences
        assert (stopped.tokens, stopped.stop_reason) == (plain.tokens[:end], StopReason.STOP)


@pytest.mark.parametrize(
    ("prompt", "field"), [((97, 256), "prompt[1]"), ((97, -1), "prompt[1]"), ((), "prompt"), ((97,) * 512, "prompt")]
)
async def test_a_wrong_prompt_is_refused_before_the_engine(
    pool: EnginePool, base_target: Target, scripted_engine: EngineEndpoint, prompt: tuple[int, ...], field: str
) -> None:
    async with Vllm(scripted_engine.url, key=scripted_engine.key, timeout_s=5) as client:
        before = await metric(client, "vllm:prompt_tokens_total")
        with pytest.raises(Invalid) as refusal:
            await pool.generate(base_target, SampleRequest(prompt=prompt, params=SamplingParams(max_tokens=1)))
        assert refusal.value.field == field
        assert await metric(client, "vllm:prompt_tokens_total") == before


@pytest.mark.parametrize(
    "body", [{"prompt": [97, 300]}, {"prompt": [[97], [300]]}, {"prompt": "a", "stop_token_ids": [300]}]
)
async def test_passed_through_token_ids_are_checked_too(
    pool: EnginePool, base_target: Target, body: dict[str, object]
) -> None:
    with pytest.raises(Invalid, match="300"):
        await pool.complete(base_target, "completions", body)


async def test_a_chat_is_answered_and_streamed_alike(pool: EnginePool, base_target: Target) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "seed": 1}

    whole = (await pool.complete(base_target, "chat/completions", body)).document
    stream = pool.stream(base_target, "chat/completions", body, asyncio.Event())
    chunks = [chunk.document async for chunk in stream]

    text = "".join(choice["delta"]["content"] for chunk in chunks for choice in chunk["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"]["completion_tokens"] == at for at, chunk in enumerate(chunks[:-1], start=1))


async def test_tokenize_gives_the_ids_the_engine_sees(pool: EnginePool, base_target: Target) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}

    tokens = await pool.tokenize(base_target, chat)

    usage = (await pool.complete(base_target, "chat/completions", chat)).document["usage"]
    assert len(tokens) == usage["prompt_tokens"]
    assert await pool.tokenize(base_target, {"prompt": "abc"}) == [97, 98, 99]
    assert await pool.tokenize(base_target, {"prompt": [[1, 2], [3]]}) == [1, 2, 3]


async def test_more_versions_than_slots_are_all_answered_never_more_at_once_than_allowed(
    own_engine: tuple[EngineProcess, EngineEndpoint], artifacts: LocalArtifacts
) -> None:
    _, endpoint = own_engine
    base = base_model_of(endpoint, max_loras=3)
    versions = [stage_scripted(artifacts, f"v{n}", base_model=base.name) for n in range(14)]
    async with (
        EnginePool(Catalog(models={base.name: base}), artifacts, key=endpoint.key, timeout_s=30) as pool,
        Vllm(endpoint.url, key=endpoint.key, timeout_s=5) as client,
    ):
        targets = [Target(base=base, version=version) for version in versions for _ in range(2)]
        answers = await asyncio.gather(*(pool.generate(target, ask()) for target in targets))

        for number, answer in enumerate(answers):
            (sequence,) = answer.sequences
            assert sequence.logprobs[0] == scripted_logprob(f"v{number // 2}", PROMPT[-1], sequence.tokens[0])
        assert await metric(client, "scripted:most_adapters_at_once") == 2
        assert 1 + 12 >= len(await client.models()) > 2  # four times max_loras stay loaded, the oldest are unloaded
        (health,) = await pool.health(base)
        assert (health.ready, health.adapters) == (True, 12)


async def test_versions_come_back_through_the_gate_after_an_engine_restart(
    own_engine: tuple[EngineProcess, EngineEndpoint], artifacts: LocalArtifacts
) -> None:
    process, endpoint = own_engine
    base = base_model_of(endpoint)
    version, broken = (stage_scripted(artifacts, name, base_model=base.name) for name in ("good", "broken"))
    targets = Target(base=base, version=version), Target(base=base, version=broken)
    async with EnginePool(Catalog(models={base.name: base}), artifacts, key=endpoint.key, timeout_s=30) as pool:
        before = [await pool.generate(target, ask()) for target in targets]
        process.stop()
        with pytest.raises(Unavailable):
            await pool.generate(targets[0], ask())
        assert [health.ready for health in await pool.health(base)] == [False]
        with pytest.raises(Unavailable):
            await pool.publish(version)
        (artifacts.path(broken.location) / SCRIPTED_NAME).write_bytes(scripted_file("changed meanwhile"))
        process.start()

        assert await pool.generate(targets[0], ask()) == before[0]
        with pytest.raises(Conflict) as refused:
            await pool.generate(targets[1], ask())
        assert refused.value.code == "version_failed_check"


async def test_an_engine_that_forgot_a_version_is_asked_again_after_loading_it(
    pool: EnginePool, artifacts: LocalArtifacts, base: BaseModel, scripted_engine: EngineEndpoint
) -> None:
    version = stage_scripted(artifacts, "mine")
    target = Target(base=base, version=version)
    before = await pool.generate(target, ask())
    async with Vllm(scripted_engine.url, key=scripted_engine.key, timeout_s=5) as client:
        await client.unload_adapter(version.id)
    stream = pool.stream(target, "completions", {"prompt": "a", "max_tokens": 3}, asyncio.Event())
    chunks = [chunk async for chunk in stream]

    assert chunks[-1].document["usage"]["completion_tokens"] == 3
    assert await pool.generate(target, ask()) == before


async def test_a_version_that_another_gateway_unloads_three_times_in_a_row_answers_all_the_same(
    artifacts: LocalArtifacts, base: BaseModel, scripted_engine: EngineEndpoint
) -> None:
    version = stage_scripted(artifacts, "mine")
    target, unloads = Target(base=base, version=version), 0
    async with Vllm(scripted_engine.url, key=scripted_engine.key, timeout_s=5) as rival:

        async def unload(version: Version, _: Check) -> None:
            nonlocal unloads
            if unloads % 4 < 3:
                await rival.unload_adapter(version.id)
            unloads += 1

        catalog = Catalog(models={base.name: base})
        async with EnginePool(catalog, artifacts, key=scripted_engine.key, timeout_s=30, witness=unload) as pool:
            generation = await pool.generate(target, ask())
            await rival.unload_adapter(version.id)
            unloads = 1  # twice more
            body = {"prompt": "a", "max_tokens": 3}
            chunks = [chunk async for chunk in pool.stream(target, "completions", body, asyncio.Event())]
    assert generation.counts.sampled == 8
    assert chunks[-1].document["usage"]["completion_tokens"] == 3
    assert unloads == 4


async def test_a_version_that_another_gateway_unloads_while_this_one_finds_it_loaded_is_loaded_again(
    artifacts: LocalArtifacts, scripted_engine: EngineEndpoint
) -> None:
    version = stage_scripted(artifacts, "mine")
    path = artifacts.path(version.location)
    async with Vllm(scripted_engine.url, key=scripted_engine.key, timeout_s=5) as rival:

        class Late(Vllm):
            """Asks for the loaded names only after the other one has unloaded, twice."""

            looks = 0

            async def models(self) -> Sequence[str]:
                self.looks += 1
                if self.looks < 3:
                    await rival.unload_adapter(version.id)
                names = await super().models()
                if self.looks < 3:
                    await rival.load_adapter(version.id, path)
                return names

        await rival.load_adapter(version.id, path)
        async with Late(scripted_engine.url, key=scripted_engine.key, timeout_s=5) as late:
            await late.load_adapter(version.id, path)
            assert late.looks == 3
        assert version.id in await rival.models()


async def test_closing_a_stream_frees_the_engine(
    own_engine: tuple[EngineProcess, EngineEndpoint], artifacts: LocalArtifacts
) -> None:
    _, endpoint = own_engine
    base = base_model_of(endpoint)
    body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}
    async with (
        EnginePool(Catalog(models={base.name: base}), artifacts, key=endpoint.key, timeout_s=30) as pool,
        Vllm(endpoint.url, key=endpoint.key, timeout_s=5) as client,
    ):
        target = Target(base=base, version=None)
        async with aclosing(pool.stream(target, "completions", body, asyncio.Event())) as chunks:
            async for _ in chunks:
                break
            assert await metric(client, "vllm:num_requests_running") == 1

        async def idle() -> bool:
            return await metric(client, "vllm:num_requests_running") == 0

        await until(idle, timeout_s=5)
        assert await metric(client, "vllm:generation_tokens_total") < 400


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
async def test_a_stopped_stream_goes_on_to_the_count_that_the_engine_has(
    own_engine: tuple[EngineProcess, EngineEndpoint], artifacts: LocalArtifacts, route: str
) -> None:
    _, endpoint = own_engine
    base = base_model_of(endpoint)
    asked = (
        {"prompt": ["ab", "cde"], "n": 2} if route == "completions" else {"messages": [{"role": "user", "content": ""}]}
    )
    prompts = (2, 3) if route == "completions" else (len("<user>\n<assistant>"),)
    counted, stop = StreamCounts(prompts, asked.get("n", 1)), asyncio.Event()
    async with (
        EnginePool(Catalog(models={base.name: base}), artifacts, key=endpoint.key, timeout_s=30) as pool,
        Vllm(endpoint.url, key=endpoint.key, timeout_s=5) as client,
    ):
        names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
        before = [await metric(client, name) for name in names]
        body = {**asked, "max_tokens": 300, "ignore_eos": True}
        async for chunk in pool.stream(Target(base=base, version=None), route, body, stop):
            counted.observe(chunk.engine, chunk.document)
            stop.set()
        after = [await metric(client, name) for name in names]

    counts = counted.counts()
    assert counts is not None
    assert not counted.ended
    assert [counts.prompt + counts.extra_prompt, counts.sampled] == [
        now - then for now, then in zip(after, before, strict=True)
    ]


async def test_an_unknown_name_is_never_told_to_the_caller(
    scripted_engine: EngineEndpoint, pool: EnginePool, artifacts: LocalArtifacts
) -> None:
    stranger = stage_scripted(artifacts, "stranger")
    await pool.publish(stranger)
    async with Vllm(scripted_engine.url, key=scripted_engine.key, timeout_s=5) as client:
        with pytest.raises(Unavailable) as refusal:
            await client.complete("ver-0000000000000000000000000x", "completions", {"prompt": "a"})
    assert stranger.id not in refusal.value.message


async def test_a_wrong_key_is_unavailable_not_the_callers_fault(scripted_engine: EngineEndpoint) -> None:
    async with Vllm(scripted_engine.url, key="wrong", timeout_s=5) as client:
        with pytest.raises(Unavailable) as refusal:
            await client.models()
    assert refusal.value.code == "engine_unauthorized"


async def test_two_replicas_share_the_work_and_one_that_is_away_is_passed_by(
    own_engine: tuple[EngineProcess, EngineEndpoint], artifacts: LocalArtifacts, tmp_path: Path
) -> None:
    process, endpoint = own_engine
    spec = scripted_spec(key=endpoint.key)
    base = dataclasses.replace(base_model_of(endpoint), engines=(endpoint.url, spec.url))
    target = Target(base=base, version=stage_scripted(artifacts, "mine"))
    launch = launch_scripted(spec, token_delay_ms=5)
    async with (
        EnginePool(Catalog(models={base.name: base}), artifacts, key=endpoint.key, timeout_s=30) as pool,
        Vllm(endpoint.url, key=endpoint.key, timeout_s=5) as first,
        Vllm(spec.url, key=endpoint.key, timeout_s=5) as second,
    ):
        with running_engine(launch, spec.url, tmp_path / "second.log"):
            answers = await asyncio.gather(*(pool.generate(target, ask()) for _ in range(8)))
            assert len({answer.sequences for answer in answers}) == 1
            assert {answer.counts.engine for answer in answers} == {endpoint.url, spec.url}
            generated = [await metric(client, "vllm:generation_tokens_total") for client in (first, second)]
            # 4 answers of 8 tokens each, and two tokens for the canary: with the adapter and without
            assert generated == [34, 34]

            process.stop()
            assert [health.ready for health in await pool.health(base)] == [False, True]
            newer = stage_scripted(artifacts, "newer")
            assert (await pool.publish(newer)).engine == spec.url
            assert (await pool.generate(target, ask())).sequences == answers[0].sequences
