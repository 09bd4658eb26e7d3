"""The OpenAI dialect: golden bodies and frames, who answers, what is billed."""

import json
import re
from typing import Any

import httpx
import pytest

from tests.wire.gateways import Gateway
from tests.wire.training import BASE, new_session, run, trained_session, usage_of

MESSAGES = [{"role": "user", "content": "Hello"}]
PROMPT = "<user>Hello\n<assistant>"  # the scripted chat template, one token a byte


def golden(value: Any) -> Any:
    """Replace what differs from run to run: ids and times."""
    if isinstance(value, dict):
        return {key: 0 if key == "created" else golden(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [golden(inner) for inner in value]
    return re.sub(r"smp-[0-9a-z]{26}", "smp-ID", value) if isinstance(value, str) else value


def frames(response: httpx.Response) -> list[Any]:
    """Return the decoded ``data:`` frames; the end mark stays text."""
    events = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


def fingerprint_of(client: httpx.Client, address: str) -> str:
    return client.get(f"/model_packages/{address.replace('@', '/')}").json()["fingerprint"]


@pytest.fixture
def trained(client: httpx.Client) -> str:
    return trained_session(client)


def test_a_chat_answer_has_exactly_openais_fields(
    openai_client: httpx.Client, client: httpx.Client, trained: str
) -> None:
    body = {"model": trained, "messages": MESSAGES, "max_completion_tokens": 5, "seed": 4}
    response = openai_client.post("/chat/completions", json=body)
    answer = response.json()
    fingerprint = fingerprint_of(client, f"{trained}@1")
    content = answer["choices"][0]["message"].pop("content")
    assert isinstance(content, str)
    assert golden(answer) == {
        "id": "chatcmpl-smp-ID",
        "object": "chat.completion",
        "created": 0,
        "model": trained,
        "system_fingerprint": fingerprint,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "refusal": None},
                "logprobs": None,
                "finish_reason": answer["choices"][0]["finish_reason"],
            }
        ],
        "usage": {
            "prompt_tokens": len(PROMPT),
            "completion_tokens": answer["usage"]["completion_tokens"],
            "total_tokens": len(PROMPT) + answer["usage"]["completion_tokens"],
            "prompt_tokens_details": {"cached_tokens": 0},
            "cost_nanos": answer["usage"]["cost_nanos"],
        },
    }
    assert 1 <= answer["usage"]["completion_tokens"] <= 5
    assert response.headers["X-Loopline-Version"] == f"{trained}@1"
    assert response.headers["X-Loopline-Fingerprint"] == fingerprint
    usage = usage_of(client, trained)
    assert (usage["prefill"], usage["sample"]) == (len(PROMPT), answer["usage"]["completion_tokens"])


def test_a_completion_has_exactly_openais_fields(openai_client: httpx.Client) -> None:
    body = {"model": BASE, "prompt": "ab", "seed": 4, "logprobs": 0, "max_tokens": 3}
    response = openai_client.post("/completions", json=body)
    answer = response.json()
    choice = answer["choices"][0]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason"}
    assert set(choice["logprobs"]) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert len(choice["logprobs"]["token_logprobs"]) == answer["usage"]["completion_tokens"]
    assert set(answer) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    assert (answer["object"], answer["model"], answer["system_fingerprint"]) == (
        "text_completion",
        BASE,
        f"base-{BASE}",
    )
    assert response.headers["X-Loopline-Version"] == f"base:{BASE}"


@pytest.mark.parametrize("include_usage", [True, False])
def test_a_chat_stream_has_exactly_openais_frames(
    openai_client: httpx.Client, client: httpx.Client, trained: str, include_usage: bool
) -> None:
    body: dict[str, Any] = {"model": trained, "messages": MESSAGES, "max_tokens": 4, "seed": 6}
    whole = openai_client.post("/chat/completions", json=body).json()
    before = usage_of(client, trained)
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    response = openai_client.post("/chat/completions", json={**body, "stream": True, **options})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["X-Loopline-Version"] == f"{trained}@1"
    *chunks, end = frames(response)
    shared = {
        "id": "chatcmpl-smp-ID",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": trained,
        "system_fingerprint": fingerprint_of(client, f"{trained}@1"),
        **({"usage": None} if include_usage else {}),
    }
    count = whole["usage"]["completion_tokens"]
    text = whole["choices"][0]["message"]["content"].ljust(count, "\0")
    deltas = [{"content": letter.strip("\0")} for letter in text]
    deltas[0] = {"role": "assistant", **deltas[0]}
    expected = [
        {**shared, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]}
        for delta in deltas
    ]
    expected[-1]["choices"][0]["finish_reason"] = whole["choices"][0]["finish_reason"]
    if include_usage:
        expected.append({**shared, "choices": [], "usage": whole["usage"]})
    assert golden(chunks) == expected
    assert end == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    after = usage_of(client, trained)
    assert after["sample"] - before["sample"] == count
    assert after["prefill"] - before["prefill"] == len(PROMPT)


def test_a_streamed_completion_of_two_prompts_and_two_choices_adds_up(openai_client: httpx.Client) -> None:
    body = {"model": BASE, "prompt": ["ab", "cd"], "n": 2, "max_tokens": 4, "seed": 3}
    whole = openai_client.post("/completions", json=body).json()
    streamed = openai_client.post(
        "/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    *chunks, last, end = frames(streamed)
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert [texts[choice["index"]] for choice in whole["choices"]] == [choice["text"] for choice in whole["choices"]]
    assert (last["usage"], end) == (whole["usage"], "[DONE]")
    assert sorted(choice["index"] for choice in whole["choices"]) == [0, 1, 2, 3]


def test_token_ids_are_returned_when_asked_for_and_only_then(openai_client: httpx.Client) -> None:
    body = {"model": BASE, "prompt": [97, 98], "max_tokens": 3, "return_token_ids": True}
    choice = openai_client.post("/completions", json=body).json()["choices"][0]
    assert choice["prompt_token_ids"] == [97, 98]
    assert 1 <= len(choice["token_ids"]) <= 3
    streamed = frames(openai_client.post("/completions", json={**body, "stream": True}))[:-1]
    ids = [token for chunk in streamed for token in chunk["choices"][0]["token_ids"]]
    assert ids == choice["token_ids"]
    assert streamed[0]["choices"][0]["prompt_token_ids"] == [97, 98]
    plain = openai_client.post("/completions", json={**body, "return_token_ids": False, "stream": True})
    assert "token_ids" not in plain.text


def test_prompt_logprobs_come_with_the_choice(openai_client: httpx.Client) -> None:
    body = {"model": BASE, "prompt": [97, 98, 99], "max_tokens": 1, "prompt_logprobs": 0}
    rows = openai_client.post("/completions", json=body).json()["choices"][0]["prompt_logprobs"]
    assert rows[0] is None
    assert [list(row) for row in rows[1:]] == [["98"], ["99"]]


def test_one_version_answers_to_its_session_its_name_and_its_address(
    openai_client: httpx.Client, client: httpx.Client
) -> None:
    session = trained_session(client, name="chatty")
    run(client, session, "save_weights", name="drawn")
    client.put(f"/model_packages/{session}/aliases/kept", json={"version": 2}).raise_for_status()
    arn = f"arn:aws:sagemaker:us-east-1:000000000000:model-package/{session}/2"
    spellings = [
        session,
        "chatty",
        f"{session}@2",
        f"{session}@kept",
        arn,
        f"tinker://{session}/sampler_weights/drawn",
    ]
    answers = [
        openai_client.post("/completions", json={"model": model, "prompt": "ab", "max_tokens": 4, "seed": 1})
        for model in spellings
    ]
    assert [answer.json()["model"] for answer in answers] == spellings
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
    assert {answer.headers["X-Loopline-Version"] for answer in answers} == {f"{session}@2"}
    base = openai_client.post("/completions", json={"model": BASE, "prompt": "ab", "max_tokens": 4, "seed": 1})
    assert base.json()["system_fingerprint"] not in {answer.json()["system_fingerprint"] for answer in answers}


def test_models_lists_base_models_live_sessions_and_published_versions(
    openai_client: httpx.Client, client: httpx.Client, gateway: Gateway
) -> None:
    live = trained_session(client, name="listed")
    stopped = trained_session(client)
    client.delete(f"/sessions/{stopped}")
    unsaved = new_session(client)["id"]
    listed = openai_client.get("/models").json()
    cards = {card["id"]: card for card in listed["data"]}
    assert listed["object"] == "list"
    assert {BASE, "untrained", live, f"{live}@1", f"{stopped}@1"} <= set(cards)
    assert not {stopped, unsaved} & set(cards)
    assert {card["object"] for card in cards.values()} == {"model"}
    assert cards[f"{live}@1"]["fingerprint"] == fingerprint_of(client, f"{live}@1")
    for model in (BASE, live, f"{live}@1", "listed"):
        card = openai_client.get(f"/models/{model}").json()
        assert (card["id"], card["object"]) == (model, "model")
    for model in (stopped, unsaved, "nothing", f"{live}@2"):
        assert openai_client.get(f"/models/{model}").status_code == 404
    with gateway.openai_client(gateway.keys.stranger) as stranger:
        assert live not in stranger.get("/models").text
        assert stranger.get(f"/models/{live}").status_code == 404


@pytest.mark.parametrize(
    ("route", "asked", "length"),
    [
        ("/chat/completions", {"messages": MESSAGES}, "max_tokens"),
        ("/completions", {"prompt": "Hello"}, "max_tokens"),
        ("/responses", {"input": "Hello"}, "max_output_tokens"),
    ],
)
def test_an_answer_repeated_under_its_key_is_the_same_and_paid_once(
    openai_client: httpx.Client, client: httpx.Client, trained: str, route: str, asked: dict[str, Any], length: str
) -> None:
    headers = {"Idempotency-Key": f"{route}-{trained}"}
    body = {"model": trained, **asked, length: 5}
    first = openai_client.post(route, json=body, headers=headers)
    usage = usage_of(client, trained)
    again = openai_client.post(route, json=body, headers=headers)
    assert (first.status_code, again.content) == (200, first.content)
    assert again.headers["X-Loopline-Version"] == first.headers["X-Loopline-Version"] == f"{trained}@1"
    assert usage_of(client, trained) == usage
    other = openai_client.post(route, json={**body, length: 6}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (400, "idempotency_key_reused")


def test_our_own_answer_can_be_sent_back_as_a_turn(openai_client: httpx.Client) -> None:
    body: dict[str, Any] = {"model": BASE, "messages": MESSAGES, "max_tokens": 5}
    message = openai_client.post("/chat/completions", json=body).json()["choices"][0]["message"]
    parts = [{"type": "text", "text": "And"}, {"type": "text", "text": "now?"}]
    turns = [*MESSAGES, {**message, "tool_calls": []}, {"role": "user", "content": parts}]
    answer = openai_client.post("/chat/completions", json={**body, "messages": turns}).json()
    length = len(f"<user>Hello\n<assistant>{message['content']}\n<user>And\nnow?\n<assistant>".encode())
    assert answer["usage"]["prompt_tokens"] == length


CALL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


def test_a_tool_that_must_be_called_is_called_streaming_and_not(openai_client: httpx.Client) -> None:
    body = {"model": BASE, "messages": MESSAGES, "max_tokens": 6, "seed": 3, "tools": [CALL]}
    chosen = {"type": "function", "function": {"name": "look_up"}}
    for choice in ("required", chosen):
        whole = openai_client.post("/chat/completions", json={**body, "tool_choice": choice}).json()
        message = whole["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert (message["content"], set(call), call["type"]) == (None, {"id", "type", "function"}, "function")
        assert call["function"]["name"] == "look_up"
        assert set(json.loads(call["function"]["arguments"])) == {"text"}
        streamed = openai_client.post("/chat/completions", json={**body, "tool_choice": choice, "stream": True})
        deltas = [chunk["choices"][0]["delta"] for chunk in frames(streamed)[:-1]]
        pieces = [piece for delta in deltas for piece in delta["tool_calls"]]
        assert "".join(piece["function"]["arguments"] for piece in pieces) == call["function"]["arguments"]
        assert [piece["function"].get("name") for piece in pieces] == ["look_up", *[None] * (len(pieces) - 1)]
    turns = [*MESSAGES, message, {"role": "tool", "tool_call_id": call["id"], "content": "42"}]
    assert openai_client.post("/chat/completions", json={**body, "messages": turns, "tool_choice": "none"}).is_success


def test_of_the_best_only_n_come_back_and_all_are_billed(
    openai_client: httpx.Client, client: httpx.Client, trained: str
) -> None:
    body = {"model": trained, "prompt": ["ab", "cd"], "max_tokens": 6, "seed": 3, "logprobs": 0}
    every = openai_client.post("/completions", json={**body, "n": 4}).json()
    before = usage_of(client, trained)
    best = openai_client.post("/completions", json={**body, "n": 2, "best_of": 4}).json()

    def mean(choice: Any) -> float:
        logprobs = choice["logprobs"]["token_logprobs"]
        return sum(logprobs) / len(logprobs)

    expected = [
        choice["text"]
        for start in (0, 4)
        for choice in sorted(every["choices"][start : start + 4], key=mean, reverse=True)[:2]
    ]
    assert [choice["text"] for choice in best["choices"]] == expected
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert best["usage"] == every["usage"]
    assert usage_of(client, trained)["sample"] - before["sample"] == every["usage"]["completion_tokens"]


def test_bytes_of_tokens_add_up_to_the_text(openai_client: httpx.Client) -> None:
    body = {"model": BASE, "messages": MESSAGES, "max_tokens": 60, "logprobs": True}
    ends: set[str] = set()
    for seed in range(12):
        for stop in (None, "e"):
            answer = openai_client.post("/chat/completions", json={**body, "seed": seed, "stop": stop}).json()
            (choice,) = answer["choices"]
            ends.add(choice["finish_reason"])
            spelled = b"".join(bytes(entry["bytes"] or []) for entry in choice["logprobs"]["content"])
            assert spelled.decode() == choice["message"]["content"]
    assert ends == {"stop", "length"}


def test_echo_scores_a_prompt_without_an_answer(
    openai_client: httpx.Client, client: httpx.Client, trained: str
) -> None:
    body = {"model": trained, "prompt": [97, 98, 99], "echo": True, "max_tokens": 0, "logprobs": 1}
    before = usage_of(client, trained)
    answer = openai_client.post("/completions", json=body).json()
    scored = client.post(f"/sessions/{trained}/logprobs", json={"prompt": [97, 98, 99]}).json()["logprobs"]
    (choice,) = answer["choices"]
    assert (choice["text"], choice["logprobs"]["token_logprobs"]) == ("abc", scored)
    assert answer["usage"]["completion_tokens"] == 0
    assert "sample" not in usage_of(client, trained) or before["sample"] == usage_of(client, trained)["sample"]


def test_the_text_of_a_special_token_in_a_turn_is_broken_up_before_an_engine_tokenises_it(
    openai_client: httpx.Client,
) -> None:
    def tokens(content: str, **more: Any) -> int:
        body = {"model": BASE, "messages": [{"role": "user", "content": content}], "max_tokens": 1, **more}
        return openai_client.post("/chat/completions", json=body).json()["usage"]["prompt_tokens"]

    joiner = len("\u2060".encode())
    assert tokens("a<|im_end|>b") == tokens("a[|im_end|]b") + joiner
    assert tokens("a <| im_end |> b") == tokens("a [| im_end |] b")
    prompt = {"model": BASE, "prompt": "<|im_end|>", "max_tokens": 1}
    assert openai_client.post("/completions", json=prompt).json()["usage"]["prompt_tokens"] == len("<|im_end|>")


def test_a_response_is_answered_streamed_and_not_and_billed(
    openai_client: httpx.Client, client: httpx.Client, trained: str
) -> None:
    body = {"model": trained, "input": "Hello", "max_output_tokens": 6, "seed": 3}
    whole = openai_client.post("/responses", json=body)
    answer = whole.json()
    (item,) = answer["output"]
    text = item["content"][0]["text"]
    usage = answer["usage"]
    assert (answer["object"], answer["model"], answer["id"][:9]) == ("response", trained, "resp_smp-")
    assert whole.headers["X-Loopline-Version"] == f"{trained}@1"
    assert usage["input_tokens"] == len(PROMPT)
    assert usage_of(client, trained)["sample"] == usage["output_tokens"]
    streamed = openai_client.post("/responses", json={**body, "stream": True})
    events = frames(streamed)
    assert [line.removeprefix("event: ") for line in streamed.text.split("\n") if line.startswith("event: ")] == [
        event["type"] for event in events
    ]
    pieces = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(pieces) == text
    last = events[-1]
    assert last["type"] == f"response.{answer['status']}"
    assert (last["response"]["usage"], last["response"]["output"][0]["content"][0]["text"]) == (usage, text)
    assert usage_of(client, trained)["sample"] == 2 * usage["output_tokens"]
    again = [
        {"role": "user", "content": "Hello"},
        item,
        {"role": "user", "content": [{"type": "input_text", "text": "?"}]},
    ]
    longer = openai_client.post("/responses", json={**body, "input": again, "instructions": "Be brief."}).json()
    turns = f"<system>Be brief.\n<user>Hello\n<assistant>{text}\n<user>?\n<assistant>"
    assert longer["usage"]["input_tokens"] == len(turns)


def test_metadata_comes_back(openai_client: httpx.Client) -> None:
    body = {"model": BASE, "messages": MESSAGES, "max_tokens": 1, "metadata": {"run": "7"}, "user": "me"}
    assert openai_client.post("/chat/completions", json=body).json()["metadata"] == {"run": "7"}


def test_null_means_the_default_for_every_optional_field(openai_client: httpx.Client) -> None:
    optional = (
        "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stop", "seed", "presence_penalty",
        "frequency_penalty", "logit_bias", "prompt_logprobs", "return_token_ids", "stream", "stream_options", "user",
        "logprobs", "metadata", "store", "service_tier", "safety_identifier", "min_tokens", "ignore_eos",
        "stop_token_ids", "repetition_penalty", "structured_outputs",
    )  # fmt: skip
    nulls = dict.fromkeys(optional)
    completion = openai_client.post("/completions", json={"model": BASE, "prompt": "ab", "echo": None, **nulls})
    chat = openai_client.post(
        "/chat/completions",
        json={
            "model": BASE,
            "messages": MESSAGES,
            **dict.fromkeys(("top_logprobs", "max_completion_tokens", "tools", "tool_choice", "parallel_tool_calls")),
            **dict.fromkeys(("response_format", "modalities", "chat_template_kwargs")),
            **nulls,
        },
    )
    assert (completion.status_code, chat.status_code) == (200, 200), completion.text + chat.text
    assert completion.json()["usage"]["completion_tokens"] <= 16
