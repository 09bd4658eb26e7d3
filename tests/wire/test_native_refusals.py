"""What the native dialect refuses: strangers, bad input, stopped sessions. Nothing refused is ever on the bill."""

import copy
import gzip
import json
from typing import Any

import httpx
import pytest

from tests.wire.gateways import UNTRAINED, Gateway, running_gateway
from tests.wire.training import BASE, datum, finish, new_session, run, submit, trained_session, usage_of

VERBS = ("forward", "forward_backward", "optim_step", "save_weights", "save_state", "load_state")
BODIES: dict[str, dict[str, Any]] = {
    "forward": {"data": [datum()]},
    "forward_backward": {"data": [datum()]},
    "load_state": {"version": "nothing@1"},
    "sample": {"prompt": [97], "max_tokens": 1},
    "logprobs": {"prompt": [97]},
}
SESSION_ROUTES = [
    ("GET", "/sessions/{id}"),
    ("DELETE", "/sessions/{id}"),
    ("GET", "/sessions/{id}/operations"),
    *[("POST", f"/sessions/{{id}}/{verb}") for verb in (*VERBS, "sample", "logprobs")],
]
ROUTES = [
    ("POST", "/sessions"),
    ("GET", "/sessions"),
    ("GET", "/operations/op-0"),
    ("POST", "/sample"),
    ("POST", "/logprobs"),
    ("GET", "/base_models"),
    ("GET", f"/base_models/{BASE}/tokenizer/tokenizer.json"),
    ("GET", "/model_packages"),
    ("GET", "/model_packages/group"),
    ("GET", "/model_packages/group/1"),
    ("GET", "/usage"),
    *[(method, path.replace("{id}", "sess-0")) for method, path in SESSION_ROUTES],
]


def refused(response: httpx.Response, status: int, code: str, field: str | None = None) -> dict[str, Any]:
    """Check the shape of a refusal and return it."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"code", "message", "kind", "field", "details", "request_id"}
    assert (error["code"], error["field"]) == (code, field), error
    assert error["request_id"] == response.headers["X-Request-Id"]
    return error


def as_seen(response: httpx.Response, *own: str) -> tuple[int, str]:
    """Return what a caller can tell from a refusal, its own words and the request id left out."""
    text = response.text.replace(response.headers["X-Request-Id"], "REQUEST")
    for word in own:
        text = text.replace(word, "IT")
    return response.status_code, text


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_key_no_answer(gateway: Gateway, method: str, path: str) -> None:
    with gateway.client("") as anonymous:
        response = anonymous.request(method, path, json=None if method == "GET" else {})
    refused(response, 401, "invalid_api_key")
    assert response.headers["WWW-Authenticate"] == "Bearer"


def test_every_kind_of_bad_key_is_refused_alike(gateway: Gateway) -> None:
    good = gateway.keys.owner
    tampered = good[:-1] + ("a" if good[-1] != "a" else "b")
    bad = [
        gateway.keys.revoked,
        gateway.keys.expired,
        gateway.keys.unknown,
        tampered,
        good.upper(),
        "sk-1",
        "tml-",
        "é",
    ]
    seen: set[tuple[int, str]] = set()
    for key in bad:
        response = httpx.get(f"{gateway.url}/training/v1/sessions", headers={"Authorization": f"Bearer {key}".encode()})
        seen.add(as_seen(response))
    basic = httpx.get(f"{gateway.url}/training/v1/sessions", auth=("user", good))
    seen.add(as_seen(basic))
    assert len(seen) == 1
    assert {status for status, _ in seen} == {401}


def test_a_strangers_body_is_not_even_read(gateway: Gateway) -> None:
    with gateway.client(gateway.keys.unknown) as unknown:
        refused(unknown.post("/sessions", content=b"not json"), 401, "invalid_api_key")


@pytest.mark.parametrize(("method", "path"), SESSION_ROUTES)
def test_someone_elses_session_is_like_a_missing_one(
    gateway: Gateway, client: httpx.Client, published: str, method: str, path: str
) -> None:
    body = None if method in ("GET", "DELETE") else BODIES.get(path.rsplit("/", 1)[-1], {})
    missing = "sess-" + "0" * 26
    with gateway.client(gateway.keys.stranger) as stranger:
        theirs = stranger.request(method, path.replace("{id}", published), json=body)
        absent = stranger.request(method, path.replace("{id}", missing), json=body)
    assert theirs.status_code == 404
    assert as_seen(theirs, published) == as_seen(absent, missing)
    refused(theirs, 404, "unknown_session", "session_id")
    assert client.get(f"/sessions/{published}").json()["status"] == "running"


def test_someone_elses_operations_versions_and_usage_are_like_missing_ones(
    gateway: Gateway, client: httpx.Client, published: str
) -> None:
    operation = client.get(f"/sessions/{published}/operations").json()["data"][0]["id"]
    version_id = client.get(f"/model_packages/{published}/1").json()["id"]
    nothing = "op-" + "0" * 26
    with gateway.client(gateway.keys.stranger) as stranger:
        pairs = [
            (stranger.get(f"/operations/{operation}"), operation, stranger.get(f"/operations/{nothing}"), nothing),
            (
                stranger.get(f"/model_packages/{published}"),
                published,
                stranger.get("/model_packages/nothing"),
                "nothing",
            ),
            (
                stranger.get(f"/model_packages/{published}/1"),
                published,
                stranger.get("/model_packages/nothing/1"),
                "nothing",
            ),
            (
                stranger.get("/usage", params={"session_id": published}),
                published,
                stranger.get("/usage", params={"session_id": "nothing"}),
                "nothing",
            ),
        ]
        for reference in (f"{published}@1", version_id):
            for path in ("/sample", "/logprobs"):
                body = {"prompt": [97], "version": reference}
                absent = {"prompt": [97], "version": "nothing@1"}
                pairs.append((stranger.post(path, json=body), reference, stranger.post(path, json=absent), "nothing@1"))
        own = new_session(stranger)["id"]
        for verb, body in (("load_state", {}), ("sample", {"prompt": [97]}), ("logprobs", {"prompt": [97]})):
            path = f"/sessions/{own}/{verb}"
            theirs = stranger.post(path, json={**body, "version": f"{published}@1"})
            absent = stranger.post(path, json={**body, "version": "nothing@1"})
            pairs.append((theirs, f"{published}@1", absent, "nothing@1"))
        assert stranger.get("/sessions", params={"after": published}).status_code == 404
        assert published not in stranger.get("/sessions").text
        assert published not in stranger.get("/model_packages").text
        assert published not in stranger.get("/usage").text
    for theirs, own_word, absent, missing_word in pairs:
        assert theirs.status_code == 404, theirs.text
        assert as_seen(theirs, own_word) == as_seen(absent, missing_word)


def test_a_key_without_the_scope_is_told_which_one_it_lacks(gateway: Gateway, published: str) -> None:
    with gateway.client(gateway.keys.inference_only) as reader:
        error = refused(reader.post("/sessions", json={"base_model": BASE}), 403, "missing_scope")
        assert error["details"] == {"scope": "train"}
        refused(reader.delete(f"/sessions/{published}"), 403, "missing_scope")
        for verb in VERBS:
            refused(reader.post(f"/sessions/{published}/{verb}", json=BODIES.get(verb, {})), 403, "missing_scope")
        assert reader.post(f"/sessions/{published}/sample", json={"prompt": [97], "max_tokens": 1}).status_code == 200


def changed(path: list[str | int], value: Any) -> dict[str, Any]:
    """Return a batch of two datums with the entry at ``path`` of the second one replaced."""
    body: dict[str, Any] = {"data": [datum(), copy.deepcopy(datum())]}
    place: Any = body["data"][1]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return body


WEIGHTS = "data[1].loss_fn_inputs.weights"
TARGETS = "data[1].loss_fn_inputs.target_tokens"
BAD_BATCHES: list[tuple[str, Any, str, str | None, dict[str, Any]]] = [
    ("empty batch", {"data": []}, "invalid_request", "data", {"limit": 1024, "got": 0}),
    ("too many datums", {"data": [datum(1)] * 1025}, "invalid_request", "data", {"limit": 1024, "got": 1025}),
    ("no data", {}, "invalid_request", "data", {}),
    ("data is no list", {"data": {}}, "invalid_request", "data", {}),
    ("body is a list", [], "invalid_request", None, {}),
    ("unknown field", {"data": [datum()], "los_fn": "ppo"}, "invalid_request", "los_fn", {}),
    ("unknown loss", {"data": [datum()], "loss_fn": "dpo"}, "unknown_loss_fn", "loss_fn", {}),
    ("loss is a number", {"data": [datum()], "loss_fn": 3}, "unknown_loss_fn", "loss_fn", {}),
    (
        "unknown setting",
        {"data": [datum()], "loss_fn_config": {"clip": 1}},
        "unknown_setting",
        "loss_fn_config.clip",
        {},
    ),
    (
        "setting is text",
        {"data": [datum()], "loss_fn_config": {"clip": "1"}},
        "invalid_request",
        "loss_fn_config.clip",
        {},
    ),
    ("seq is text", {"data": [datum()], "seq": "1"}, "invalid_request", "seq", {}),
    ("seq is true", {"data": [datum()], "seq": True}, "invalid_request", "seq", {}),
    ("seq is zero", {"data": [datum()], "seq": 0}, "invalid_request", "seq", {}),
    ("seq is huge", {"data": [datum()], "seq": 2**40}, "invalid_request", "seq", {}),
    ("datum is a number", {"data": [datum(), 3]}, "invalid_request", "data[1]", {"datum": 1}),
    ("unknown datum field", changed(["tokens"], [1]), "invalid_request", "data[1].tokens", {"datum": 1}),
    ("no input", changed(["model_input"], None), "invalid_request", "data[1].model_input", {"datum": 1}),
    ("empty input", changed(["model_input"], []), "invalid_request", "data[1].model_input", {"datum": 1}),
    (
        "token outside the vocabulary",
        changed(["model_input", 2], 256),
        "token_out_of_vocabulary",
        "data[1].model_input[2]",
        {"datum": 1, "position": 2, "limit": 256},
    ),
    (
        "negative token",
        changed(["model_input", 0], -1),
        "token_out_of_vocabulary",
        "data[1].model_input[0]",
        {"datum": 1, "position": 0, "limit": 256},
    ),
    (
        "target outside the vocabulary",
        changed(["loss_fn_inputs", "target_tokens", 3], 10**6),
        "token_out_of_vocabulary",
        f"{TARGETS}[3]",
        {"datum": 1, "position": 3, "limit": 256},
    ),
    (
        "token beyond 64 bits",
        changed(["model_input", 1], 2**63),
        "bad_value",
        "data[1].model_input[1]",
        {"datum": 1, "position": 1},
    ),
    (
        "token beyond everything",
        changed(["model_input", 1], 10**40),
        "invalid_request",
        "data[1].model_input[1]",
        {"datum": 1, "position": 1},
    ),
    (
        "token is a fraction",
        changed(["model_input", 1], 1.5),
        "invalid_request",
        "data[1].model_input[1]",
        {"datum": 1, "position": 1},
    ),
    (
        "token is true",
        changed(["model_input", 1], True),
        "invalid_request",
        "data[1].model_input[1]",
        {"datum": 1, "position": 1},
    ),
    (
        "token is null in a chunk",
        changed(["model_input"], {"chunks": [{"tokens": [1, None]}]}),
        "invalid_request",
        "data[1].model_input.chunks[0].tokens[1]",
        {"datum": 1, "position": 1},
    ),
    (
        "chunk of another type",
        changed(["model_input"], {"chunks": [{"type": "image"}]}),
        "invalid_request",
        "data[1].model_input.chunks[0].type",
        {"datum": 1},
    ),
    (
        "short weights",
        changed(["loss_fn_inputs", "weights"], [1.0]),
        "length_mismatch",
        WEIGHTS,
        {"datum": 1, "limit": 4, "got": 1},
    ),
    (
        "weight beyond float32",
        changed(["loss_fn_inputs", "weights", 2], 1e39),
        "non_finite",
        f"{WEIGHTS}[2]",
        {"datum": 1, "position": 2},
    ),
    (
        "weight is text",
        changed(["loss_fn_inputs", "weights", 2], "1"),
        "invalid_request",
        f"{WEIGHTS}[2]",
        {"datum": 1, "position": 2},
    ),
    (
        "weights are missing",
        changed(["loss_fn_inputs"], {"target_tokens": [1] * 4}),
        "missing_loss_input",
        WEIGHTS,
        {"datum": 1},
    ),
    ("weights are null", changed(["loss_fn_inputs", "weights"], None), "invalid_request", WEIGHTS, {"datum": 1}),
    ("inputs are a list", changed(["loss_fn_inputs"], []), "invalid_request", "data[1].loss_fn_inputs", {"datum": 1}),
    (
        "unknown input",
        changed(["loss_fn_inputs", "advantages"], [1.0] * 4),
        "unknown_loss_input",
        "data[1].loss_fn_inputs.advantages",
        {"datum": 1},
    ),
    (
        "unknown dtype",
        changed(["loss_fn_inputs", "weights"], {"dtype": "float16", "shape": [4], "data": [1] * 4}),
        "invalid_request",
        f"{WEIGHTS}.dtype",
        {"datum": 1},
    ),
    (
        "wrong dtype",
        changed(["loss_fn_inputs", "weights"], {"dtype": "int64", "shape": [4], "data": [1] * 4}),
        "invalid_request",
        WEIGHTS,
        {"datum": 1},
    ),
    (
        "shape and data differ",
        changed(["loss_fn_inputs", "weights"], {"dtype": "float32", "shape": [5], "data": [1] * 4}),
        "shape_mismatch",
        f"{WEIGHTS}.data",
        {"datum": 1, "got": 4},
    ),
    (
        "negative shape",
        changed(["loss_fn_inputs", "weights"], {"dtype": "float32", "shape": [-4], "data": [1] * 4}),
        "invalid_request",
        f"{WEIGHTS}.shape",
        {"datum": 1},
    ),
    (
        "too long",
        changed(["model_input"], [1] * 513),
        "context_length_exceeded",
        "data[1].model_input",
        {"datum": 1, "limit": 512, "got": 513},
    ),
]


@pytest.fixture(scope="module")
def victim(gateway: Gateway) -> str:
    """A session that hears a lot of nonsense; the last test shows that it goes on."""
    with gateway.client() as client:
        return new_session(client)["id"]


@pytest.mark.parametrize("verb", ["forward", "forward_backward"])
@pytest.mark.parametrize(
    ("body", "code", "field", "details"), [case[1:] for case in BAD_BATCHES], ids=[case[0] for case in BAD_BATCHES]
)
def test_a_bad_batch_is_refused_and_says_where(
    client: httpx.Client, victim: str, verb: str, body: Any, code: str, field: str | None, details: dict[str, Any]
) -> None:
    error = refused(client.post(f"/sessions/{victim}/{verb}", json=body), 400, code, field)
    assert error["kind"] == "invalid"
    assert error["details"].items() >= details.items()


LEARNING_RATE = "adam_params.learning_rate"
GROUP = "model_package_group"
BAD_CALLS: list[tuple[str, str, Any, int, str, str | None]] = [
    ("unknown adam field", "optim_step", {"adam_params": {"lr": 1}}, 400, "invalid_request", "adam_params.lr"),
    ("negative lr", "optim_step", {"adam_params": {"learning_rate": -1}}, 400, "invalid_request", LEARNING_RATE),
    ("beta of one", "optim_step", {"adam_params": {"beta1": 1.0}}, 400, "invalid_request", "adam_params.beta1"),
    ("lr is text", "optim_step", {"adam_params": {"learning_rate": "1"}}, 400, "invalid_request", LEARNING_RATE),
    ("lr is true", "optim_step", {"adam_params": {"learning_rate": True}}, 400, "invalid_request", LEARNING_RATE),
    ("group with a slash", "save_weights", {GROUP: "a/b"}, 400, "invalid_request", GROUP),
    ("empty group", "save_state", {GROUP: ""}, 400, "invalid_request", GROUP),
    ("long description", "save_state", {"description": "x" * 1025}, 400, "invalid_request", "description"),
    ("other publish", "save_weights", {"publish": "later"}, 400, "invalid_request", "publish"),
    ("no version", "load_state", {}, 400, "invalid_request", "version"),
    ("unknown version", "load_state", {"version": "nothing@1"}, 404, "unknown_version", "version"),
    ("version with a path", "load_state", {"version": "../../etc/passwd"}, 404, "unknown_version", "version"),
    ("empty prompt", "sample", {"prompt": []}, 400, "invalid_request", "prompt"),
    ("prompt is text", "sample", {"prompt": "hello"}, 400, "invalid_request", "prompt"),
    ("prompt with true", "sample", {"prompt": [1, True]}, 400, "invalid_request", "prompt[1]"),
    ("prompt outside", "sample", {"prompt": [1, 256]}, 400, "token_out_of_vocabulary", "prompt[1]"),
    ("long prompt", "sample", {"prompt": [1] * 513}, 400, "context_length_exceeded", "prompt"),
    ("full prompt", "sample", {"prompt": [1] * 500, "max_tokens": 13}, 400, "context_length_exceeded", "max_tokens"),
    ("no samples", "sample", {"prompt": [1], "num_samples": 0}, 400, "invalid_request", "num_samples"),
    ("too many samples", "sample", {"prompt": [1], "num_samples": 257}, 400, "invalid_request", "num_samples"),
    ("hot", "sample", {"prompt": [1], "temperature": 2.1}, 400, "invalid_request", "temperature"),
    ("top_p of zero", "sample", {"prompt": [1], "top_p": 0}, 400, "invalid_request", "top_p"),
    ("top_k of zero", "sample", {"prompt": [1], "top_k": 0}, 400, "invalid_request", "top_k"),
    ("stop", "sample", {"prompt": [1], "stop_token_ids": [256]}, 400, "token_out_of_vocabulary", "stop_token_ids[0]"),
    ("empty stop", "sample", {"prompt": [1], "stop": [""]}, 400, "invalid_request", "stop[0]"),
    ("stop is a number", "sample", {"prompt": [1], "stop": 3}, 400, "invalid_request", "stop"),
    ("huge seed", "sample", {"prompt": [1], "seed": 10**30}, 400, "invalid_request", "seed"),
    ("unknown field", "sample", {"prompt": [1], "best_of": 2}, 400, "invalid_request", "best_of"),
    ("long scored prompt", "logprobs", {"prompt": [1] * 513}, 400, "context_length_exceeded", "prompt"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("verb", "body", "status", "code", "field"), [case[1:] for case in BAD_CALLS], ids=[case[0] for case in BAD_CALLS]
)
def test_a_bad_call_is_refused_and_says_where(
    client: httpx.Client, published: str, verb: str, body: Any, status: int, code: str, field: str | None
) -> None:
    before = usage_of(client, published)
    refused(client.post(f"/sessions/{published}/{verb}", json=body), status, code, field)
    assert usage_of(client, published) == before


RAW: list[tuple[str, bytes, str | None]] = [
    ("empty body", b"", None),
    ("half an object", b'{"seq": 1', None),
    ("NaN", b'{"adam_params": {"learning_rate": NaN}}', None),
    ("Infinity", b'{"adam_params": {"learning_rate": -Infinity}}', None),
    ("beyond a double", b'{"adam_params": {"learning_rate": 1e999}}', None),
    ("NUL", b'{"description": "a\\u0000b"}', "description"),
    ("NUL in a name", b'{"a\\u0000": 1}', "a\\u0000"),
    ("lone surrogate", b'{"description": "\\ud800"}', None),
    ("invalid UTF-8", b'{"description": "\xff"}', None),
    ("raw control character", b'{"description": "\x01"}', None),
    ("deep nesting", b'{"description": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    ("nesting that is too deep", b'{"description": ' + b"[" * 200 + b"]" * 200 + b"}", None),
    ("nesting that is not", b'{"description": ' + b"[" * 199 + b"]" * 199 + b"}", "description"),
    ("a long integer", b'{"seq": 1' + b"0" * 10_000 + b"}", None),
    ("null", b"null", None),
    ("text", b'"{}"', None),
    ("two documents", b"{}{}", None),
    ("byte order mark", b"\xef\xbb\xbf{}", None),
]


@pytest.mark.parametrize("verb", ["optim_step", "save_weights", "forward"])
@pytest.mark.parametrize(("content", "field"), [case[1:] for case in RAW], ids=[case[0] for case in RAW])
def test_what_is_not_strict_json_is_refused(
    client: httpx.Client, victim: str, verb: str, content: bytes, field: str | None
) -> None:
    response = client.post(f"/sessions/{victim}/{verb}", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["code"] == "invalid_request"
    if field is not None and verb == "save_weights":
        assert error["field"] == field


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_that_is_not_called_json_is_refused(client: httpx.Client, victim: str, content_type: str) -> None:
    response = client.post(
        f"/sessions/{victim}/optim_step", content=b"{}", headers={"Content-Type": content_type} if content_type else {}
    )
    refused(response, 400, "invalid_request", "Content-Type")


@pytest.mark.parametrize(
    ("encoding", "content", "code"),
    [
        ("br", b"{}", "unsupported_encoding"),
        ("gzip, zstd", b"{}", "unsupported_encoding"),
        ("gzip", b"{}", "invalid_request"),
        ("gzip", gzip.compress(b"{}")[:-4], "invalid_request"),
        ("gzip", gzip.compress(b"{}") + b"more", "invalid_request"),
        ("zstd", b"{}", "invalid_request"),
    ],
)
def test_a_damaged_or_unknown_encoding_is_refused(
    client: httpx.Client, victim: str, encoding: str, content: bytes, code: str
) -> None:
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    response = client.post(f"/sessions/{victim}/optim_step", content=content, headers=headers)
    refused(response, 400, code, "Content-Encoding")


def test_after_all_this_the_session_goes_on_and_the_bill_is_empty(client: httpx.Client, victim: str) -> None:
    assert client.get(f"/sessions/{victim}/operations").json()["data"] == []
    assert client.get("/usage", params={"session_id": victim}).json() == {"total_cost_nanos": 0, "data": []}
    assert run(client, victim, "forward_backward", data=[datum()])["seq"] == 1
    assert usage_of(client, victim) == {"train": 4}


BAD_SESSIONS: list[tuple[str, dict[str, Any], int, str, str]] = [
    ("unknown base model", {"base_model": "gpt-9"}, 404, "unknown_base_model", "base_model"),
    ("no base model", {}, 400, "invalid_request", "base_model"),
    ("rank above the engines", {"base_model": UNTRAINED, "lora": {"rank": 9}}, 400, "rank_too_large", "lora.rank"),
    ("rank of zero", {"base_model": BASE, "lora": {"rank": 0}}, 400, "invalid_request", "lora.rank"),
    ("rank is text", {"base_model": BASE, "lora": {"rank": "8"}}, 400, "invalid_request", "lora.rank"),
    ("unknown lora field", {"base_model": BASE, "lora": {"dropout": 0.1}}, 400, "invalid_request", "lora.dropout"),
    ("alpha of zero", {"base_model": BASE, "lora": {"rank": 8, "alpha": 0}}, 400, "invalid_request", "lora.alpha"),
    ("negative seed", {"base_model": BASE, "lora": {"rank": 8, "seed": -1}}, 400, "invalid_request", "lora.seed"),
    (
        "nothing trains",
        {"base_model": BASE, "lora": {"rank": 8, "train_attn": False, "train_mlp": False}},
        400,
        "invalid_request",
        "lora",
    ),
    ("name with a slash", {"base_model": BASE, "name": "a/b"}, 400, "invalid_request", "name"),
    ("name with a newline", {"base_model": BASE, "name": "a\n"}, 400, "invalid_request", "name"),
    ("name like an id", {"base_model": BASE, "lora": {"rank": 8}, "name": "sess-1"}, 400, "invalid_request", "name"),
    ("name of a base model", {"base_model": BASE, "lora": {"rank": 8}, "name": BASE}, 400, "invalid_request", "name"),
    ("short life", {"base_model": BASE, "ttl_seconds": 59}, 400, "invalid_request", "ttl_seconds"),
    ("long life", {"base_model": BASE, "ttl_seconds": 2592001}, 400, "invalid_request", "ttl_seconds"),
    ("metadata of numbers", {"base_model": BASE, "user_metadata": {"a": 1}}, 400, "invalid_request", "user_metadata.a"),
    (
        "group with a space",
        {"base_model": BASE, "lora": {"rank": 8}, "model_package_group": "a b"},
        400,
        "invalid_request",
        "model_package_group",
    ),
    ("unknown field", {"base_model": BASE, "loRa": {}}, 400, "invalid_request", "loRa"),
]


@pytest.mark.parametrize(
    ("body", "status", "code", "field"), [case[1:] for case in BAD_SESSIONS], ids=[case[0] for case in BAD_SESSIONS]
)
def test_a_bad_session_is_refused_and_says_where(
    client: httpx.Client, body: dict[str, Any], status: int, code: str, field: str
) -> None:
    error = refused(client.post("/sessions", json=body), status, code, field)
    if code == "rank_too_large":
        assert error["details"] == {"limit": 8, "got": 9}
        assert "8" in error["message"]
    if code == "unknown_base_model":
        assert BASE in error["message"]


def test_a_live_sessions_name_is_taken_until_it_stops(client: httpx.Client) -> None:
    first = new_session(client, name="taken")["id"]
    body = {"base_model": BASE, "lora": {"rank": 8}, "name": "taken"}
    refused(client.post("/sessions", json=body), 409, "session_name_taken", "name")
    client.delete(f"/sessions/{first}")
    second = client.post("/sessions", json=body)
    assert second.status_code == 201
    assert client.get("/sessions/taken").json()["id"] == second.json()["id"]


def test_a_stopped_session_takes_no_work(client: httpx.Client) -> None:
    session = trained_session(client)
    client.delete(f"/sessions/{session}")
    before = usage_of(client, session)
    for verb in (*VERBS, "sample", "logprobs"):
        body = {**BODIES.get(verb, {}), **({"version": f"{session}@1"} if verb == "load_state" else {})}
        response = client.post(f"/sessions/{session}/{verb}", json=body)
        refused(response, 409, "session_not_running", None)
    assert usage_of(client, session) == before
    assert client.post("/sample", json={"version": f"{session}@1", "prompt": [97], "max_tokens": 1}).status_code == 200


def test_nothing_is_ever_answered_by_other_weights_than_asked_for(client: httpx.Client, session: str) -> None:
    for verb in ("sample", "logprobs"):
        response = client.post(f"/sessions/{session}/{verb}", json={"prompt": [97]})
        refused(response, 409, "no_published_version", "version")
    state = run(client, session, "save_state")["result"]["version"]
    for path in (f"/sessions/{session}/sample", "/sample"):
        response = client.post(path, json={"prompt": [97], "version": state})
        refused(response, 409, "version_not_published", "version")
    for body in ({}, {"version": state, "base_model": BASE}):
        refused(client.post("/sample", json={"prompt": [97], **body}), 400, "invalid_request", "version")
    refused(
        client.post("/sample", json={"prompt": [97], "base_model": "gpt-9"}), 404, "unknown_base_model", "base_model"
    )
    assert usage_of(client, session) == {}


def test_a_version_of_another_base_model_is_refused(client: httpx.Client, published: str) -> None:
    other = new_session(client, base_model=UNTRAINED)["id"]
    response = client.post(f"/sessions/{other}/sample", json={"prompt": [97], "version": f"{published}@1"})
    refused(response, 400, "base_model_mismatch", "version")


def test_a_base_model_without_an_engine_is_unavailable_for_now(client: httpx.Client) -> None:
    response = client.post("/sample", json={"prompt": [97], "base_model": UNTRAINED})
    refused(response, 503, "no_engine")
    assert response.headers["Retry-After"] == "1"


def test_a_failed_operation_says_why_and_the_session_goes_on(client: httpx.Client, session: str) -> None:
    failed = finish(client, submit(client, session, "optim_step")["id"])
    assert (failed["status"], failed["result"], failed["error"]["kind"]) == ("failed", None, "invalid")
    assert failed["error"]["code"] == "empty_window"
    assert (failed["usage"], failed["cost_nanos"]) == ({}, 0)
    run(client, session, "forward_backward", data=[datum()])
    assert run(client, session, "optim_step")["result"]["optimizer_step"] == 1


def test_unknown_paths_and_methods_answer_in_this_dialects_shape(client: httpx.Client, gateway: Gateway) -> None:
    refused(client.get("/nowhere"), 404, "unknown_path")
    refused(client.get("/sessions/"), 404, "unknown_path")
    refused(client.put("/sessions", json={}), 405, "method_not_allowed")
    refused(client.post("/usage", json={}), 405, "method_not_allowed")
    refused(httpx.get(f"{gateway.url}/nowhere"), 404, "unknown_path")
    refused(httpx.get(f"{gateway.url}/training/v1"), 404, "unknown_path")


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/sessions?limit=0", "limit"),
        ("/sessions?limit=201", "limit"),
        ("/sessions?offset=1", "offset"),
        ("/operations/op-0?wait=61", "wait"),
        ("/operations/op-0?wait=-1", "wait"),
        ("/operations/op-0?wait=nan", "wait"),
        ("/operations/op-0?wait=inf", "wait"),
        ("/usage?since=yesterday", "since"),
        ("/usage?since=2026-01-01T00:00:00", "since"),
    ],
)
def test_a_bad_query_is_refused_and_says_where(client: httpx.Client, path: str, field: str) -> None:
    refused(client.get(path), 400, "invalid_request", field)


@pytest.mark.parametrize("reference", ["0", "99999999999999999999", "one"])
def test_neither_a_number_nor_an_alias_of_the_group_is_a_missing_version(client: httpx.Client, reference: str) -> None:
    refused(client.get(f"/model_packages/group/{reference}"), 404, "unknown_version", "version")


@pytest.mark.parametrize("name", ["%00", "a%0Ab", "..", "x" * 5000, "%ff", "sess-%00"])
def test_odd_names_in_a_path_are_missing_things(client: httpx.Client, name: str) -> None:
    for path in (f"/sessions/{name}", f"/operations/{name}", f"/model_packages/{name}", f"/model_packages/{name}/1"):
        assert client.get(path).status_code == 404, path


def test_only_the_listed_tokenizer_files_can_be_read(scripted_engine: Any, tmp_path: Any) -> None:
    import dataclasses

    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text('{"version": "1.0"}')
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_text("weights")
    (tmp_path / "secret.json").write_text("secret")
    (model / "merges.txt").symlink_to(tmp_path / "nowhere")
    endpoint = dataclasses.replace(scripted_engine, model_path=model)
    with running_gateway(endpoint, tmp_path / "data", trainer=False) as gateway, gateway.client() as client:
        card = client.get("/base_models").json()["data"][0]
        assert card == {
            "name": BASE, "context_length": 512, "vocab_size": 256, "max_lora_rank": endpoint.max_lora_rank,
            "dtype": "float32", "tokenizer_files": ["tokenizer.json", "config.json"],
        }  # fmt: skip
        assert client.get(f"/base_models/{BASE}/tokenizer/tokenizer.json").json() == {"version": "1.0"}
        for file in ("model.safetensors", "..%2fsecret.json", "%2e%2e/secret.json", "merges.txt", "nothing"):
            assert client.get(f"/base_models/{BASE}/tokenizer/{file}").status_code == 404, file
        assert client.get("/base_models/other/tokenizer/tokenizer.json").status_code == 404


def test_bodies_are_bounded_before_and_after_decompression(scripted_engine: Any, tmp_path: Any) -> None:
    limit = 100_000
    env = {"LOOPLINE_MAX_BODY_BYTES": str(limit)}
    with (
        running_gateway(scripted_engine, tmp_path / "data", trainer=False, env=env) as gateway,
        gateway.client() as client,
    ):
        session = new_session(client)["id"]
        path = f"/sessions/{session}/forward"
        fits = json.dumps({"data": [datum()]}).encode()
        fits += b" " * (limit - len(fits))
        headers = {"Content-Type": "application/json"}
        assert client.post(path, content=fits, headers=headers).status_code == 202
        for content in (fits + b" ", fits * 10, iter([fits, b" "]), iter([fits] * 10)):
            response = client.post(path, content=content, headers=headers)
            assert refused(response, 413, "body_too_large")["details"] == {"limit": limit}
        import zstandard

        for encoding, packed in (("gzip", gzip.compress(fits + b" ")), ("zstd", zstandard.compress(fits * 1000))):
            response = client.post(path, content=packed, headers={**headers, "Content-Encoding": encoding})
            refused(response, 413, "body_too_large")
        assert client.get(f"/sessions/{session}").json()["status"] == "running"
