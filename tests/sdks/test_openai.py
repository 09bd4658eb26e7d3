"""The unmodified ``openai`` client against a real port, streaming and not."""

from collections.abc import Iterator

import openai
import pytest

from tests.engines.fixtures import scripted_engine
from tests.stack import EngineEndpoint
from tests.wire.gateways import Gateway, running_gateway
from tests.wire.training import BASE, trained_session, usage_of

__all__ = ["scripted_engine"]

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def gateway(scripted_engine: EngineEndpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with running_gateway(scripted_engine, tmp_path_factory.mktemp("openai") / "data", trainer=True) as started:
        yield started


@pytest.fixture
def chat(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.keys.owner, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def session(gateway: Gateway) -> str:
    with gateway.client() as client:
        return trained_session(client, name="live")


def test_a_live_session_chats_streaming_and_not(gateway: Gateway, chat: openai.OpenAI, session: str) -> None:
    whole = chat.chat.completions.create(model="live", messages=HELLO, max_tokens=12, seed=5)
    stream = chat.chat.completions.create(
        model=session, messages=HELLO, max_tokens=12, seed=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage is not None
    assert chunks[-1].usage == whole.usage
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert {chunk.system_fingerprint for chunk in chunks} == {whole.system_fingerprint}
    with gateway.client() as client:
        assert usage_of(client, session)["sample"] == 2 * whole.usage.completion_tokens


def test_completions_take_text_and_token_ids(chat: openai.OpenAI, session: str) -> None:
    text = chat.completions.create(model=session, prompt="ab", max_tokens=6, seed=2, logprobs=0)
    ids = chat.completions.create(model=f"{session}@1", prompt=[97, 98], max_tokens=6, seed=2, logprobs=0)
    assert text.choices[0].text == ids.choices[0].text
    assert text.choices[0].logprobs == ids.choices[0].logprobs
    streamed = chat.completions.create(model=session, prompt="ab", max_tokens=6, seed=2, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == text.choices[0].text


def test_the_answer_names_the_exact_version(chat: openai.OpenAI, session: str) -> None:
    raw = chat.chat.completions.with_raw_response.create(model=session, messages=HELLO, max_tokens=1)
    assert raw.headers["x-loopline-version"] == f"{session}@1"
    assert raw.headers["x-loopline-fingerprint"] == raw.parse().system_fingerprint


def test_models_can_be_listed_and_read(chat: openai.OpenAI, session: str) -> None:
    assert {BASE, session, f"{session}@1"} <= {model.id for model in chat.models.list()}
    assert chat.models.retrieve(f"{session}@1").owned_by == "loopline"
    with pytest.raises(openai.NotFoundError) as refusal:
        chat.models.retrieve("nothing")
    assert refusal.value.code == "model_not_found"


def test_errors_arrive_as_the_clients_own_exceptions(gateway: Gateway, chat: openai.OpenAI, session: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        chat.chat.completions.create(model=session, messages=HELLO, temperature=3)
    assert (refusal.value.code, refusal.value.param) == ("invalid_request", "temperature")
    with pytest.raises(openai.NotFoundError):
        chat.chat.completions.create(model="nothing", messages=HELLO)
    with (
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="sk-wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError) as unknown,
    ):
        stranger.models.list()
    assert unknown.value.code == "invalid_api_key"


async def test_the_async_client_streams(gateway: Gateway, session: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.keys.owner, max_retries=0) as client:
        stream = await client.chat.completions.create(model=session, messages=HELLO, max_tokens=8, seed=5, stream=True)
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
