"""Streams that end early, on an engine that takes its time: billed once, for what was produced."""

import asyncio
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest

from gateway.core.scripted import read_fingerprint
from gateway.engines.launch import launch_scripted
from gateway.engines.scripted_answers import chat_prompt
from gateway.engines.scripted_model import Draw, draw, encode
from tests.engines.fixtures import EngineProcess, endpoint_of, running_engine, scripted_spec
from tests.wire.gateways import Gateway, running_gateway
from tests.wire.training import BASE, trained_session, usage_of

TOKEN_S = 0.05
BODY: dict[str, Any] = {
    "prompt": "abc",
    "max_tokens": 400,
    "stream": True,
    "seed": 1,
    "stream_options": {"include_usage": True},
}


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, EngineProcess]]:
    """A gateway in front of an engine that spends 50 ms on a token."""
    folder = tmp_path_factory.mktemp("slow")
    spec = scripted_spec()
    launch = launch_scripted(spec)
    delayed = dataclasses.replace(launch, command=(*launch.command, "--token-delay-ms", str(TOKEN_S * 1000)))
    with (
        running_engine(delayed, spec.url, folder / "engine.log") as engine,
        running_gateway(endpoint_of(spec, vocab_size=256), folder / "data", trainer=True) as gateway,
    ):
        yield gateway, engine


def long_stream(gateway: Gateway, client: httpx.Client, session: str) -> dict[str, Any]:
    """Return a request whose answer is long."""
    return {"model": session, **BODY, "seed": long_seed(gateway, client, session, encode(BODY["prompt"]))}


def long_seed(gateway: Gateway, client: httpx.Client, session: str, prompt: Sequence[int]) -> int:
    """Return the seed of the longest answer: the scripted engine ends a sequence at any token with 1 in 64."""
    version = client.get(f"/model_packages/{session}/1").json()["id"]
    (directory,) = gateway.settings.artifact_dir.glob(f"{version}*")
    fingerprint = read_fingerprint(directory)

    def length(seed: int) -> int:
        one = Draw(
            fingerprint=fingerprint,
            prompt=tuple(prompt),
            max_tokens=BODY["max_tokens"],
            seed=seed,
            greedy=False,
            stop_token_ids=frozenset(),
            stop=(),
            ignore_end=False,
        )
        return sum(1 for _ in draw(one))

    return max(range(64), key=length)


def wait_for_usage(client: httpx.Client, session: str, meter: str, timeout_s: float = 10.0) -> dict[str, int]:
    deadline = time.monotonic() + timeout_s
    while meter not in (usage := usage_of(client, session)):
        assert time.monotonic() < deadline, usage
    return usage


def test_a_client_that_leaves_pays_for_what_was_produced_and_the_engine_stops(
    slow: tuple[Gateway, EngineProcess],
) -> None:
    gateway, engine = slow
    with gateway.client() as client, gateway.openai_client() as chat:
        session = trained_session(client)
        seen = 0
        with chat.stream("POST", "/completions", json=long_stream(gateway, client, session)) as response:
            for line in response.iter_lines():
                seen += line.startswith("data: ")
                if seen == 5:
                    break
        usage = wait_for_usage(client, session, "sample")
        assert usage["prefill"] == 3
        assert 5 <= usage["sample"] <= 5 + 1 / TOKEN_S
        generated = engine_counts(engine)
        time.sleep(6 * TOKEN_S)
        assert engine_counts(engine) == generated
        assert usage_of(client, session) == usage


def test_usage_is_durable_before_the_client_sees_the_end(slow: tuple[Gateway, EngineProcess]) -> None:
    gateway, _ = slow
    with gateway.client() as client, gateway.openai_client() as chat:
        session = trained_session(client)
        body = {"model": session, **BODY, "max_tokens": 5}
        with chat.stream("POST", "/completions", json=body) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                choices = json.loads(line.removeprefix("data: "))["choices"]
                if choices and choices[0]["finish_reason"] is not None:
                    assert usage_of(client, session)["prefill"] == 3
                    break
            else:
                raise AssertionError("no finish reason")


def test_an_engine_that_dies_in_mid_stream_is_an_error_frame_without_an_end_mark(
    slow: tuple[Gateway, EngineProcess],
) -> None:
    gateway, engine = slow
    with gateway.client() as client, gateway.openai_client() as chat:
        session = trained_session(client)
        lines: list[str] = []
        with chat.stream("POST", "/completions", json=long_stream(gateway, client, session)) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                if line.startswith("data: "):
                    lines.append(line.removeprefix("data: "))
                    if len(lines) == 5:
                        engine.kill()
        try:
            assert lines[-1] != "[DONE]"
            error = json.loads(lines[-1])["error"]
            assert (error["type"], error["code"]) == ("server_error", "engine_lost")
            usage = wait_for_usage(client, session, "sample")
            assert usage["sample"] == len(lines) - 1
            gone = chat.post("/completions", json={"model": session, **BODY})
            assert (gone.status_code, gone.json()["error"]["code"]) == (503, "engine_lost")
        finally:
            engine.start()
        body = {"model": session, **BODY, "max_tokens": 2}
        assert chat.post("/completions", json=body).text.rstrip().endswith("data: [DONE]")


def test_an_engine_that_dies_in_mid_stream_makes_the_openai_client_raise_on_every_route(
    slow: tuple[Gateway, EngineProcess],
) -> None:
    gateway, engine = slow
    messages = [{"role": "user", "content": "abc"}]
    with gateway.client() as client:
        session = trained_session(client)
        seed = long_seed(gateway, client, session, chat_prompt(messages))
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.keys.owner, max_retries=0) as sdk:
        asked: dict[str, Any] = {"model": session, "stream": True, "extra_body": {"seed": seed}}
        streams: list[Any] = [
            sdk.completions.create(prompt=chat_prompt(messages), max_tokens=400, **asked),
            sdk.chat.completions.create(messages=messages, max_tokens=400, **asked),
            sdk.responses.create(input="abc", max_output_tokens=400, **asked),
        ]
        for stream in streams:
            next(iter(stream))
        engine.kill()
        try:
            for stream in streams:
                with pytest.raises(openai.APIError) as raised:
                    list(stream)
                assert raised.value.code == "engine_lost"
        finally:
            engine.start()


def test_many_streams_that_are_cut_are_billed_once_each(
    slow: tuple[Gateway, EngineProcess],
) -> None:
    gateway, _ = slow
    count = 40

    async def cut(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        async with client.stream("POST", "/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    return

    async def all_of_them(body: dict[str, Any]) -> None:
        headers = {"Authorization": f"Bearer {gateway.keys.owner}"}
        async with httpx.AsyncClient(base_url=f"{gateway.url}/v1", headers=headers, timeout=60) as client:
            await asyncio.gather(*(cut(client, body) for _ in range(count)))

    with gateway.client() as client:
        session = trained_session(client)
        asyncio.run(all_of_them(long_stream(gateway, client, session)))
        deadline = time.monotonic() + 20
        while usage_of(client, session).get("prefill", 0) < 3 * count:
            assert time.monotonic() < deadline
        assert usage_of(client, session)["prefill"] == 3 * count
        assert client.get(f"/sessions/{session}").json()["status"] == "running"


@pytest.mark.parametrize("dialect", ["native", "openai", "responses", "streamed responses"])
def test_a_client_that_leaves_without_its_answer_pays_for_what_was_produced_and_the_engine_stops(
    slow: tuple[Gateway, EngineProcess], dialect: str
) -> None:
    gateway, engine = slow
    with gateway.client() as client, gateway.openai_client() as chat:
        session = trained_session(client)
        body = {**long_stream(gateway, client, session), "stream": False, "stream_options": None}
        sampling = {"prompt": list(body["prompt"].encode()), "max_tokens": body["max_tokens"], "seed": body["seed"]}
        caller, path, asked = (chat, "/completions", body)
        if dialect == "native":
            caller, path, asked = (client, f"/sessions/{session}/sample", sampling)
        if "responses" in dialect:
            streams = dialect.startswith("streamed")
            seed = long_seed(gateway, client, session, chat_prompt([{"role": "user", "content": "ab"}]))
            asked = {"model": session, "input": "ab", "max_output_tokens": 400, "stream": streams, "seed": seed}
            path = "/responses"
        before = engine_counts(engine)
        with pytest.raises(httpx.ReadTimeout):
            leave_after(caller, path, asked, 8 * TOKEN_S)
        left = time.monotonic()
        usage = wait_for_usage(client, session, "sample")
        stopped = engine_counts(engine)

        assert time.monotonic() - left < 2
        assert (usage["prefill"], usage["sample"]) == tuple(
            now - then for now, then in zip(stopped, before, strict=True)
        )
        time.sleep(6 * TOKEN_S)
        assert engine_counts(engine) == stopped
        assert usage_of(client, session) == usage


def test_a_call_with_a_key_runs_to_its_end_for_the_client_that_comes_back(
    slow: tuple[Gateway, EngineProcess],
) -> None:
    gateway, _ = slow
    with gateway.client() as client:
        session = trained_session(client)
        path = f"/sessions/{session}/sample"
        asked = {"prompt": [97], "max_tokens": 12, "seed": 3, "ignore_eos": True}
        headers = {"Idempotency-Key": "left-and-came-back"}
        with pytest.raises(httpx.ReadTimeout):
            client.post(path, json=asked, headers=headers, timeout=4 * TOKEN_S)
        usage = wait_for_usage(client, session, "sample")
        again = client.post(path, json=asked, headers=headers)

        assert again.status_code == 200, again.text
        assert again.json()["usage"]["sample"] == usage["sample"] == 12
        assert usage_of(client, session) == usage


def leave_after(client: httpx.Client, path: str, body: dict[str, Any], patience_s: float) -> None:
    """Ask, and leave in mid-answer. Raises ReadTimeout."""
    left = time.monotonic() + patience_s
    with client.stream("POST", path, json=body, timeout=patience_s) as response:
        for _ in response.iter_lines():
            if time.monotonic() > left:
                raise httpx.ReadTimeout("enough")


def engine_counts(engine: EngineProcess) -> tuple[int, ...]:
    """Return the prompt and the generated tokens that the engine counted."""
    lines = dict(line.rsplit(" ", 1) for line in httpx.get(f"{engine.url}/metrics").text.splitlines())
    return tuple(int(lines[f"vllm:{kind}_tokens_total"]) for kind in ("prompt", "generation"))


def test_the_base_model_streams_too(slow: tuple[Gateway, EngineProcess]) -> None:
    gateway, _ = slow
    with gateway.openai_client() as chat:
        answer = chat.post("/completions", json={"model": BASE, **BODY, "max_tokens": 2})
    assert answer.text.rstrip().endswith("data: [DONE]")
