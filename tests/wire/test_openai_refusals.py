"""What the OpenAI dialect refuses, in OpenAI's shape; nothing refused is on the bill."""

from typing import Any

import httpx
import pytest

from tests.wire.gateways import UNTRAINED, Gateway
from tests.wire.training import BASE, new_session, run, trained_session, usage_of

MESSAGES = [{"role": "user", "content": "Hello"}]
ROUTES = [
    ("GET", "/models"),
    ("GET", f"/models/{BASE}"),
    ("POST", "/completions"),
    ("POST", "/chat/completions"),
    ("POST", "/responses"),
]


def refused(response: httpx.Response, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param), error
    return error


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("kind", ["", "revoked", "expired", "unknown"])
def test_no_valid_key_no_answer(gateway: Gateway, method: str, path: str, kind: str) -> None:
    with gateway.openai_client(getattr(gateway.keys, kind) if kind else "") as nobody:
        response = nobody.request(method, path, content=b"not json" if method == "POST" else None)
    assert refused(response, 401, "invalid_api_key")["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/completions", "/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_someone_elses_model_is_like_a_missing_one(gateway: Gateway, published: str, path: str, stream: bool) -> None:
    body = {"prompt": "ab"} if path == "/completions" else {"messages": MESSAGES}
    seen: set[str] = set()
    with gateway.openai_client(gateway.keys.stranger) as stranger:
        for model in (published, f"{published}@1", "sess-" + "0" * 26, "nothing", "nothing@1", "../../etc", "\u00e9"):
            response = stranger.post(path, json={"model": model, "stream": stream, **body})
            refused(response, 404, "model_not_found", "model")
            seen.add(response.text)
        assert stranger.get(f"/models/{published}").json() == stranger.get("/models/nothing").json()
    assert len(seen) == 1


SCHEMA = "response_format.json_schema.schema"


def tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look_up", "parameters": parameters}}


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


TOOLS = [tool({"type": "object"})]
CALL_OTHER = {"type": "function", "function": {"name": "other"}}


BAD: list[tuple[str, dict[str, Any], str, str | None]] = [
    ("unknown field", {"best": 2}, "invalid_request", "best"),
    ("no model", {"model": None}, "invalid_request", "model"),
    ("model is a number", {"model": 3}, "invalid_request", "model"),
    ("hot", {"temperature": 2.5}, "invalid_request", "temperature"),
    ("cold", {"temperature": -0.1}, "invalid_request", "temperature"),
    ("temperature is text", {"temperature": "1"}, "invalid_request", "temperature"),
    ("top_p of zero", {"top_p": 0}, "invalid_request", "top_p"),
    ("top_k of zero", {"top_k": 0}, "invalid_request", "top_k"),
    ("top_k above the vocabulary", {"top_k": 257}, "invalid_request", "top_k"),
    ("min_p above one", {"min_p": 1.1}, "invalid_request", "min_p"),
    ("n of zero", {"n": 0}, "invalid_request", "n"),
    ("n above the cap", {"n": 129}, "invalid_request", "n"),
    ("n at temperature 0", {"n": 2, "temperature": 0}, "invalid_request", "n"),
    ("seed too large", {"seed": 2**63}, "invalid_request", "seed"),
    ("penalty", {"presence_penalty": 2.1}, "invalid_request", "presence_penalty"),
    ("too many stops", {"stop": ["a"] * 17}, "invalid_request", "stop"),
    ("empty stop", {"stop": [""]}, "invalid_request", "stop[0]"),
    ("long stop", {"stop": "x" * 257}, "invalid_request", "stop[0]"),
    ("bias outside the vocabulary", {"logit_bias": {"256": 1}}, "token_out_of_vocabulary", "logit_bias[0]"),
    ("bias of no token", {"logit_bias": {"abc": 1}}, "invalid_request", "logit_bias"),
    ("bias too strong", {"logit_bias": {"1": 101}}, "invalid_request", "logit_bias"),
    ("bias is text", {"logit_bias": {"1": "5"}}, "invalid_request", "logit_bias"),
    ("stream is text", {"stream": "yes"}, "invalid_request", "stream"),
    ("options without a stream", {"stream_options": {"include_usage": True}}, "invalid_request", "stream_options"),
    (
        "unknown option",
        {"stream": True, "stream_options": {"include": True}},
        "invalid_request",
        "stream_options.include",
    ),
    ("a long seed", {"seed": 2**70}, "invalid_request", "seed"),
    ("an open parenthesis", {"structured_outputs": {"regex": "(a"}}, "invalid_grammar", "structured_outputs.regex"),
    (
        "a rule that is not there",
        {"structured_outputs": {"grammar": "root ::= x"}},
        "invalid_grammar",
        "structured_outputs.grammar",
    ),
    ("no constraint", {"structured_outputs": {}}, "invalid_request", "structured_outputs"),
    (
        "two constraints",
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        "invalid_request",
        "structured_outputs",
    ),
    (
        "a stop outside the vocabulary",
        {"stop_token_ids": [1, 256]},
        "token_out_of_vocabulary",
        "stop_token_ids[1]",
    ),
    ("more at least than at most", {"max_tokens": 3, "min_tokens": 4}, "invalid_request", "min_tokens"),
    ("too many prompt logprobs", {"prompt_logprobs": 21}, "invalid_request", "prompt_logprobs"),
    ("prompt logprobs in a stream", {"prompt_logprobs": 1, "stream": True}, "invalid_request", "prompt_logprobs"),
]
BAD_CHATS: list[tuple[str, dict[str, Any], str, str | None]] = [
    ("no messages", {"messages": []}, "invalid_request", "messages"),
    ("messages are text", {"messages": "hi"}, "invalid_request", "messages"),
    ("unknown role", {"messages": [{"role": "judge", "content": ""}]}, "invalid_request", "messages[0].role"),
    ("no call", {"messages": [{"role": "tool", "content": ""}]}, "invalid_request", "messages[0].tool_call_id"),
    ("no content", {"messages": [{"role": "user"}]}, "invalid_request", "messages[0].content"),
    (
        "an image",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "invalid_request",
        "messages[0].content[0].type",
    ),
    (
        "a tool call",
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
        "invalid_request",
        "messages[0].tool_calls[0].id",
    ),
    ("tools", {"tools": []}, "invalid_request", "tools"),
    ("a template", {"chat_template": "{{ messages }}"}, "invalid_request", "chat_template"),
    (
        "a template among the arguments",
        {"chat_template_kwargs": {"chat_template": "x"}},
        "chat_template_refused",
        "chat_template_kwargs.chat_template",
    ),
    (
        "a list among the arguments",
        {"chat_template_kwargs": {"x": []}},
        "invalid_request",
        "chat_template_kwargs.x",
    ),
    ("a form without its schema", {"response_format": {"type": "json_schema"}}, "invalid_request", SCHEMA[:-7]),
    ("a schema of no type", json_schema({"type": "objekt"}), "invalid_grammar", SCHEMA),
    ("a schema that leads nowhere", json_schema({"$ref": "#/nothing"}), "invalid_grammar", SCHEMA),
    ("a deep schema", json_schema(nested(65)), "invalid_grammar", SCHEMA),
    ("a choice without tools", {"tool_choice": "required"}, "invalid_request", "tool_choice"),
    (
        "a choice of no tool",
        {"tools": TOOLS, "tool_choice": CALL_OTHER},
        "invalid_request",
        "tool_choice.function.name",
    ),
    ("its own choice", {"tools": TOOLS}, "no_tool_parser", "tool_choice"),
    ("a choice of no kind", {"tools": TOOLS, "tool_choice": "any"}, "invalid_request", "tool_choice.type"),
    ("two tools of one name", {"tools": TOOLS * 2}, "invalid_request", "tools[1].function.name"),
    (
        "a tool whose arguments have no type",
        {"tools": [tool({"type": "objekt"})], "tool_choice": "required"},
        "invalid_grammar",
        "tools[0].function.parameters",
    ),
    (
        "a form and a tool",
        {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
        "invalid_request",
        "response_format",
    ),
    ("audio", {"modalities": ["audio"]}, "invalid_request", "modalities[0]"),
    ("to be kept", {"store": True}, "invalid_request", "store"),
    ("too much metadata", {"metadata": {str(n): "" for n in range(17)}}, "invalid_request", "metadata"),
    ("no tokens", {"max_tokens": 0}, "invalid_request", "max_tokens"),
    ("no tokens, new name", {"max_completion_tokens": 0}, "invalid_request", "max_completion_tokens"),
    ("two limits", {"max_tokens": 1, "max_completion_tokens": 2}, "invalid_request", "max_tokens"),
    ("alternatives without logprobs", {"top_logprobs": 2}, "invalid_request", "top_logprobs"),
    ("too many alternatives", {"logprobs": True, "top_logprobs": 21}, "invalid_request", "top_logprobs"),
    ("long answer", {"max_completion_tokens": 500}, "context_length_exceeded", "max_completion_tokens"),
    (
        "long conversation",
        {"messages": [{"role": "user", "content": "x" * 600}]},
        "context_length_exceeded",
        "messages",
    ),
]
BAD_COMPLETIONS: list[tuple[str, dict[str, Any], str, str | None]] = [
    ("no prompt", {"prompt": None}, "invalid_request", "prompt"),
    ("empty text", {"prompt": ""}, "invalid_request", "prompt"),
    ("empty list", {"prompt": []}, "invalid_request", "prompt"),
    ("empty ids", {"prompt": [[1], []]}, "invalid_request", "prompt[1]"),
    ("mixed", {"prompt": ["a", [1]]}, "invalid_request", "prompt"),
    ("ids with true", {"prompt": [1, True]}, "invalid_request", "prompt"),
    ("id outside the vocabulary", {"prompt": [1, 256]}, "token_out_of_vocabulary", "prompt[1]"),
    ("id outside, second prompt", {"prompt": [[1], [1, -1]]}, "token_out_of_vocabulary", "prompt[1][1]"),
    ("too many prompts", {"prompt": ["a"] * 65}, "invalid_request", "prompt"),
    ("too many sequences", {"prompt": ["a"] * 64, "n": 5}, "invalid_request", "n"),
    ("no tokens without echo", {"max_tokens": 0}, "invalid_request", "max_tokens"),
    ("too many logprobs", {"logprobs": 21}, "invalid_request", "logprobs"),
    ("ids with echo", {"echo": True, "return_token_ids": True}, "invalid_request", "return_token_ids"),
    ("suffix", {"suffix": "x"}, "invalid_request", "suffix"),
    ("fewer than it keeps", {"n": 3, "best_of": 2}, "invalid_request", "best_of"),
    ("the best of a stream", {"best_of": 2, "stream": True}, "invalid_request", "best_of"),
    ("the best of an echo", {"best_of": 2, "echo": True}, "invalid_request", "best_of"),
    ("long answer", {"max_tokens": 511}, "context_length_exceeded", "max_tokens"),
    ("long prompt", {"prompt": [1] * 512}, "context_length_exceeded", "prompt"),
]


def cases(*lists: list[tuple[str, dict[str, Any], str, str | None]]) -> Any:
    every = [case for some in lists for case in some]
    return pytest.mark.parametrize(
        ("change", "code", "param"), [case[1:] for case in every], ids=[case[0] for case in every]
    )


@cases(BAD, BAD_CHATS)
def test_a_bad_chat_is_refused_and_names_the_field(
    openai_client: httpx.Client, client: httpx.Client, published: str, change: dict[str, Any], code: str, param: str
) -> None:
    before = usage_of(client, published)
    response = openai_client.post("/chat/completions", json={"model": published, "messages": MESSAGES, **change})
    assert refused(response, 400, code, param)["type"] == "invalid_request_error"
    assert usage_of(client, published) == before


@cases(BAD, BAD_COMPLETIONS)
def test_a_bad_completion_is_refused_and_names_the_field(
    openai_client: httpx.Client, client: httpx.Client, published: str, change: dict[str, Any], code: str, param: str
) -> None:
    before = usage_of(client, published)
    response = openai_client.post("/completions", json={"model": published, "prompt": "ab", **change})
    assert refused(response, 400, code, param)["type"] == "invalid_request_error"
    assert usage_of(client, published) == before


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"input": []}, "invalid_request", "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "invalid_request",
            "input[0].content[0].type",
        ),
        ({"tools": [{"type": "web_search"}]}, "invalid_request", "tools"),
        ({"previous_response_id": "resp_1"}, "invalid_request", "previous_response_id"),
        ({"store": True}, "invalid_request", "store"),
        ({"max_output_tokens": 0}, "invalid_request", "max_output_tokens"),
        ({"max_output_tokens": 500}, "context_length_exceeded", "max_output_tokens"),
        ({"input": "x" * 600}, "context_length_exceeded", "input"),
        ({"temperature": 2.5}, "invalid_request", "temperature"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "objekt"}}}},
            "invalid_grammar",
            "text.format.schema",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "invalid_request", "text.format.schema"),
        ({"truncation": "auto"}, "invalid_request", "truncation"),
    ],
    ids=str,
)
def test_a_bad_response_is_refused_and_names_the_field(
    openai_client: httpx.Client, change: dict[str, Any], code: str, param: str
) -> None:
    refused(openai_client.post("/responses", json={"model": BASE, "input": "Hello", **change}), 400, code, param)


def test_an_overlong_request_hears_both_numbers(openai_client: httpx.Client) -> None:
    body = {"model": BASE, "prompt": [97] * 500, "max_tokens": 20}
    error = refused(openai_client.post("/completions", json=body), 400, "context_length_exceeded", "max_tokens")
    assert "512" in error["message"]
    assert "520" in error["message"]
    exact = openai_client.post("/completions", json={**body, "max_tokens": 12})
    assert exact.status_code == 200, exact.text


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"temperature": NaN}', b'{"temperature": 1e999}', b'{"user": "\\u0000"}', b"\xff"]
)
def test_what_is_not_strict_json_is_refused(openai_client: httpx.Client, content: bytes) -> None:
    response = openai_client.post("/chat/completions", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_request"


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (b'{"temperature": NaN}', "temperature"),
        (b'{"logit_bias": {"1": [0, -Infinity]}}', "logit_bias.1[1]"),
        (b'{"top_p": 1e999}', "top_p"),
    ],
)
def test_a_number_that_is_not_finite_is_named_by_its_field(
    openai_client: httpx.Client, content: bytes, param: str
) -> None:
    response = openai_client.post("/chat/completions", content=content, headers={"Content-Type": "application/json"})
    assert "finite" in refused(response, 400, "invalid_request", param)["message"]


def test_an_integer_beyond_the_range_hears_it(openai_client: httpx.Client) -> None:
    response = openai_client.post("/completions", json={"model": BASE, "prompt": "a", "seed": 2**70})
    assert str(2**63 - 1) in refused(response, 400, "invalid_request", "seed")["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_session_without_a_version_is_never_answered_by_the_base(
    openai_client: httpx.Client, client: httpx.Client, session: str, stream: bool
) -> None:
    body = {"messages": MESSAGES, "stream": stream}
    response = openai_client.post("/chat/completions", json={"model": session, **body})
    refused(response, 400, "no_published_version", "model")
    state = run(client, session, "save_state")["result"]["version"]
    refused(
        openai_client.post("/chat/completions", json={"model": state, **body}), 400, "version_not_published", "model"
    )
    assert usage_of(client, session) == {}


def test_a_stopped_session_answers_no_more_and_its_version_does(
    openai_client: httpx.Client, client: httpx.Client
) -> None:
    session = trained_session(client, name="leaving")
    client.delete(f"/sessions/{session}")
    for model in (session, "leaving"):
        response = openai_client.post("/completions", json={"model": model, "prompt": "ab"})
        refused(response, 400, "session_not_running")
    assert openai_client.post("/completions", json={"model": f"{session}@1", "prompt": "ab"}).status_code == 200


def test_no_engine_is_a_503_that_may_be_tried_again(openai_client: httpx.Client) -> None:
    for stream in (True, False):
        body = {"model": UNTRAINED, "prompt": [97], "stream": stream}
        response = openai_client.post("/completions", json=body)
        assert refused(response, 503, "no_engine")["type"] == "server_error"
        assert response.headers["Retry-After"] == "1"


def test_a_key_for_training_alone_does_not_chat(gateway: Gateway) -> None:
    from datetime import UTC, datetime

    from gateway.auth.keys import mint
    from gateway.auth.master import open_keyring
    from gateway.core.ports import UnitOfWork
    from gateway.core.principals import Scope

    async def training_key(unit: UnitOfWork) -> str:
        project = await unit.keys.ensure_project("mine")
        keyring = open_keyring(gateway.settings)
        scopes = frozenset({Scope.TRAIN})
        return (await mint(unit, keyring, project_id=project, name="t", scopes=scopes, at=datetime.now(UTC)))[1]

    with gateway.openai_client(gateway.in_unit(training_key)) as trainer:
        response = trainer.post("/chat/completions", json={"model": BASE, "messages": MESSAGES})
        assert refused(response, 403, "missing_scope")["type"] == "permission_error"
        assert trainer.get("/models").status_code == 403


def test_a_key_cannot_be_combined_with_a_stream(openai_client: httpx.Client) -> None:
    response = openai_client.post(
        "/completions",
        json={"model": BASE, "prompt": "ab", "stream": True},
        headers={"Idempotency-Key": "k"},
    )
    refused(response, 400, "invalid_request", "Idempotency-Key")


def test_unknown_paths_and_methods_answer_in_openais_shape(openai_client: httpx.Client) -> None:
    refused(openai_client.get("/embeddings"), 404, "unknown_url")
    refused(openai_client.get("/models/"), 404, "model_not_found", "model")
    refused(openai_client.put("/models", json={}), 405, "method_not_allowed")
    refused(openai_client.get("/completions"), 405, "method_not_allowed")


def test_a_session_that_was_just_opened_is_not_a_model(openai_client: httpx.Client, client: httpx.Client) -> None:
    session = new_session(client)["id"]
    refused(openai_client.get(f"/models/{session}"), 404, "model_not_found", "model")
