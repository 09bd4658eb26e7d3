"""What the Tinker dialect refuses, and how: permanent refusals carry a status that its SDK does not repeat."""

import math
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import zstandard

from gateway.wire.tinker import wire_pb2 as pb
from tests.wire.gateways import Gateway
from tests.wire.test_keys import key_of
from tests.wire.test_limits import limit
from tests.wire.training import BASE

PROTOBUF = {"Content-Type": "application/x-protobuf"}


def connect(gateway: Gateway, key: str) -> httpx.Client:
    return httpx.Client(base_url=f"{gateway.url}/tinker/api/v1", headers={"X-API-Key": key}, timeout=60)


@pytest.fixture
def raw(gateway: Gateway) -> Iterator[httpx.Client]:
    with connect(gateway, gateway.keys.owner) as client:
        yield client


def ok(response: httpx.Response) -> Any:
    assert response.status_code in (200, 204), response.text
    return response.json() if response.content else None


def new_client(raw: httpx.Client) -> str:
    return ok(raw.post("/create_session", json={"tags": [], "sdk_version": "0"}))["session_id"]


def new_model(raw: httpx.Client, **changes: Any) -> str:
    body = {"session_id": new_client(raw), "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 8}}
    return ok(raw.post("/create_model", json={**body, **changes}))["model_id"]


def batch(model: str, seq: int, length: int = 3, *, loss_fn: str = "cross_entropy", token: int = 97) -> bytes:
    message = pb.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn=loss_fn)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = b"".join(
        (token + at).to_bytes(4, "little", signed=True) for at in range(length)
    )
    targets = b"".join((token + 1 + at).to_bytes(8, "little", signed=True) for at in range(length))
    datum.loss_fn_inputs["target_tokens"].CopyFrom(pb.Tensor(dense=targets, dtype=pb.DTYPE_INT64, shape=[length]))
    weights = (b"\x00\x00\x80\x3f") * length
    datum.loss_fn_inputs["weights"].CopyFrom(pb.Tensor(dense=weights, dtype=pb.DTYPE_FLOAT32, shape=[length]))
    return message.SerializeToString()


def post_batch(raw: httpx.Client, content: bytes, **headers: str) -> httpx.Response:
    return raw.post("/forward_backward", content=content, headers={**PROTOBUF, **headers})


def result(raw: httpx.Client, future: dict[str, Any]) -> httpx.Response:
    while True:
        response = raw.post("/retrieve_future", json={"request_id": future["request_id"], "allow_metadata_only": True})
        if "json" not in response.headers["content-type"] or response.json().get("type") != "try_again":
            return response


@pytest.mark.parametrize("key", ["stranger", "unknown", "revoked", "expired"])
def test_a_stranger_finds_nothing(gateway: Gateway, raw: httpx.Client, key: str) -> None:
    model = new_model(raw)
    session = model.split(":")[0]
    future = ok(post_batch(raw, batch(model, 1)))
    wanted = 404 if key == "stranger" else 401
    with connect(gateway, getattr(gateway.keys, key)) as other:
        answers = [
            other.post("/get_info", json={"model_id": model}),
            post_batch(other, batch(model, 2)),
            other.post("/optim_step", json={"model_id": model, "seq_id": 2, "adam_params": {}}),
            other.post("/retrieve_future", json={"request_id": future["request_id"]}),
            other.post("/session_heartbeat", json={"session_id": session}),
            other.get(f"/sessions/{session}"),
            other.get(f"/training_runs/{model}"),
            other.get(f"/training_runs/{model}/checkpoints"),
            other.post(f"/sessions/{session}/finish", json={"reason": {"type": "success"}}),
            other.post("/create_model", json={"session_id": session, "model_seq_id": 1, "base_model": BASE}),
            other.post("/weights_info", json={"tinker_path": f"tinker://{model}/weights/x"}),
        ]
    assert [answer.status_code for answer in answers] == [wanted] * len(answers)
    assert all(answer.json()["category"] == "user" for answer in answers)


def test_a_key_for_inference_does_not_train(gateway: Gateway, raw: httpx.Client) -> None:
    model = new_model(raw)
    with connect(gateway, gateway.keys.inference_only) as other:
        assert post_batch(other, batch(model, 1)).status_code == 403


def test_a_result_says_what_it_cost(raw: httpx.Client) -> None:
    model = new_model(raw)
    trained = result(raw, ok(post_batch(raw, batch(model, 1))))
    assert int(trained.headers["X-Loopline-Cost-Nanos"]) > 0
    asked = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [97]}]}, "seq_id": 0}
    sampler = {"session_id": model.split(":")[0], "sampling_session_seq_id": 0, "base_model": BASE}
    seat = ok(raw.post("/create_sampling_session", json=sampler))["sampling_session_id"]
    sample = {**asked, "sampling_session_id": seat, "sampling_params": {"max_tokens": 2}}
    drawn = result(raw, ok(raw.post("/asample", json=sample)))
    assert int(drawn.headers["X-Loopline-Cost-Nanos"]) > 0


def test_repeating_a_request_changes_nothing(raw: httpx.Client) -> None:
    session = new_client(raw)
    body = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 8}}
    first, again = ok(raw.post("/create_model", json=body)), ok(raw.post("/create_model", json=body))
    assert first == again
    model = first["model_id"]
    assert model == f"{session}:train:0"
    futures = [ok(post_batch(raw, batch(model, 1))) for _ in range(2)]
    assert futures[0] == futures[1]
    results = [result(raw, futures[0]).content for _ in range(2)]
    assert results[0] == results[1]
    assert pb.ForwardBackwardOutput.FromString(results[0]).metrics["loss:sum"] > 3
    other = post_batch(raw, batch(model, 1, length=2))
    assert (other.status_code, other.json()["code"], other.json()["category"]) == (400, "sequence_reused", "user")
    assert raw.post("/create_model", json={**body, "base_model": "untrained"}).status_code == 400


def test_a_rejected_seq_blocks_nobody(raw: httpx.Client) -> None:
    model = new_model(raw)
    refused = post_batch(raw, batch(model, 1, loss_fn="stable_reinforce"))
    assert refused.status_code == 400
    assert "importance_sampling" in refused.json()["error"]
    assert (
        raw.post("/optim_step", json={"model_id": model, "seq_id": 2, "adam_params": {"beta1": 2.0}}).status_code == 400
    )
    backward = ok(post_batch(raw, batch(model, 3)))
    assert result(raw, backward).headers["content-type"] == "application/x-protobuf"
    # The gradient lacks what the first request would have added, so nothing is stepped on.
    step = ok(raw.post("/optim_step", json={"model_id": model, "seq_id": 4, "adam_params": {}}))
    assert result(raw, step).json()["code"] == "incomplete_window"
    ok(post_batch(raw, batch(model, 5)))
    step = ok(raw.post("/optim_step", json={"model_id": model, "seq_id": 6, "adam_params": {}}))
    assert result(raw, step).json()["type"] == "optim_step"


def test_a_refused_step_leaves_the_gradient_as_it_was(raw: httpx.Client) -> None:
    model = new_model(raw)
    ok(post_batch(raw, batch(model, 1)))
    assert (
        raw.post("/optim_step", json={"model_id": model, "seq_id": 2, "adam_params": {"eps": -1.0}}).status_code == 400
    )
    step = ok(raw.post("/optim_step", json={"model_id": model, "seq_id": 3, "adam_params": {}}))
    assert result(raw, step).json()["type"] == "optim_step"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda d: d.loss_fn_inputs["weights"].ClearField("dense"), "data[0].loss_fn_inputs.weights"),
        (
            lambda d: setattr(d.loss_fn_inputs["weights"], "dense", b"\x00\x00\xc0\x7f" * 3),
            "data[0].loss_fn_inputs.weights[0]",
        ),
        (lambda d: setattr(d.model_input[0].encoded_text, "tokens", b"\xff\xff\xff\x7f" * 3), "data[0].model_input[0]"),
        (lambda d: setattr(d.model_input[0].encoded_text, "tokens", b"\x01"), "data[0].model_input.chunks[0].tokens"),
        (lambda d: d.loss_fn_inputs["mask"].CopyFrom(d.loss_fn_inputs["weights"]), "data[0].loss_fn_inputs.mask"),
        (lambda d: setattr(d.loss_fn_inputs["weights"], "dtype", pb.DTYPE_INT32), "data[0].loss_fn_inputs.weights"),
        (lambda d: setattr(d.model_input.add().image, "format", "png"), "data[0].model_input.chunks[1]"),
    ],
)
def test_a_bad_batch_is_refused_by_place(raw: httpx.Client, change: Any, field: str) -> None:
    message = pb.ForwardBackwardRequest.FromString(batch(new_model(raw), 1))
    change(message.data[0])
    answer = post_batch(raw, message.SerializeToString())
    assert (answer.status_code, answer.json()["field"]) == (400, field)


def sparse(rows: list[int], columns: list[int], shape: list[int]) -> pb.Tensor:
    def packed(numbers: list[int]) -> bytes:
        return b"".join(number.to_bytes(8, "little", signed=True) for number in numbers)

    csr = pb.SparseCsr(values=packed([5] * len(columns)), crow_indices=packed(rows), col_indices=packed(columns))
    return pb.Tensor(sparse_csr=csr, dtype=pb.DTYPE_INT64, shape=shape)


@pytest.mark.parametrize(
    "tensor",
    [
        sparse([0, 1], [0], [3, 2]),
        sparse([0, 2, 1, 1], [0], [3, 2]),
        sparse([0, 1, 1, 1], [2], [3, 2]),
        sparse([0, 1, 1, 1], [0], [3, 2**40]),
        sparse([0, 1, 1, 1], [0], [3]),
    ],
)
def test_a_sparse_array_whose_parts_do_not_fit_is_refused(raw: httpx.Client, tensor: pb.Tensor) -> None:
    message = pb.ForwardBackwardRequest.FromString(batch(new_model(raw), 1))
    message.data[0].loss_fn_inputs["target_tokens"].CopyFrom(tensor)
    answer = post_batch(raw, message.SerializeToString())
    assert answer.status_code == 400
    assert "data[0].loss_fn_inputs.target_tokens" in answer.json()["error"]


def test_bodies_may_be_compressed_and_must_be_whole(raw: httpx.Client) -> None:
    model = new_model(raw)
    packed = zstandard.compress(batch(model, 1))
    assert post_batch(raw, packed, **{"Content-Encoding": "zstd"}).status_code == 200
    assert post_batch(raw, packed[:-3], **{"Content-Encoding": "zstd"}).status_code == 400
    assert post_batch(raw, b"\xff\xff\xff").status_code == 400
    assert raw.post("/forward_backward", json={}).status_code == 400
    assert raw.post("/optim_step", content=batch(model, 2), headers=PROTOBUF).status_code == 400


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "optimizer_config.type"),
        ({"lora_config": {"rank": 64}}, "lora.rank"),
        ({"lora_config": {"rank": 8, "alpha": 3}}, "lora_config.alpha"),
        ({"user_metadata": {"a": 1}}, "user_metadata.a"),
        ({"model_seq_id": -1}, "model_seq_id"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_model_that_is_not_offered_is_refused_by_field(raw: httpx.Client, body: dict[str, Any], field: str) -> None:
    session = new_client(raw)
    asked = {"session_id": session, "model_seq_id": 0, "base_model": BASE, **body}
    answer = raw.post("/create_model", json=asked)
    assert (answer.status_code, answer.json()["field"]) == (400, field)


def test_a_finished_program_is_told_to_stop(raw: httpx.Client) -> None:
    model = new_model(raw)
    session = model.split(":")[0]
    assert raw.post("/session_heartbeat", json={"session_id": session}).status_code == 200
    assert (
        raw.post(f"/sessions/{session}/finish", json={"reason": {"type": "errored"}, "detail": "x"}).status_code == 204
    )
    assert raw.post("/session_heartbeat", json={"session_id": session}).status_code == 410
    answer = post_batch(raw, batch(model, 1))
    assert (answer.status_code, answer.json()["code"]) == (400, "session_not_running")
    opened = raw.post("/create_model", json={"session_id": session, "model_seq_id": 1, "base_model": BASE})
    assert (opened.status_code, opened.json()["code"]) == (400, "client_finished")


def sampler(raw: httpx.Client) -> dict[str, Any]:
    body = {"session_id": new_client(raw), "sampling_session_seq_id": 0, "base_model": BASE}
    return {
        "sampling_session_id": ok(raw.post("/create_sampling_session", json=body))["sampling_session_id"],
        "seq_id": 0,
    }


def asked(handle: dict[str, Any], **changes: Any) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [97, 98, 99]}]}
    return {"prompt": prompt, "sampling_params": {"max_tokens": 4}, "num_samples": 2, **handle, **changes}


def test_a_sample_is_computed_once_and_can_be_fetched_again(raw: httpx.Client) -> None:
    handle = sampler(raw)
    futures = [ok(raw.post("/asample", json=asked(handle))) for _ in range(2)]
    assert futures[0] == futures[1]
    assert len(set(futures[0]["sample_sequence_ids"])) == 2
    fetched = [result(raw, futures[0]) for _ in range(2)]
    answers = [answer.content for answer in fetched]
    assert answers[0] == answers[1]
    assert {answer.headers["X-Loopline-Version"] for answer in fetched} == {f"base:{BASE}"}
    assert all(answer.headers["X-Loopline-Fingerprint"] for answer in fetched)
    assert len(pb.SampleResponse.FromString(answers[0]).sequences) == 2
    other = raw.post("/asample", json=asked(handle, num_samples=1))
    assert (other.status_code, other.json()["code"]) == (400, "idempotency_key_reused")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
        ({"record_stability_info": True}, "record_stability_info"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "prompt_logprobs_last_n"),
        ({"topk_sample_logprobs": 99}, "topk_sample_logprobs"),
        ({"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}, "prompt.chunks[0]"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [256]}]}}, "prompt[0]"),
        ({"sampling_params": {"temperature": -1.0}}, "temperature"),
        ({"sampling_params": {"max_tokens": 600}}, "max_tokens"),
    ],
)
def test_a_sample_that_is_not_offered_is_refused_by_field(
    raw: httpx.Client, changes: dict[str, Any], field: str
) -> None:
    answer = raw.post("/asample", json=asked(sampler(raw), **changes))
    assert (answer.status_code, answer.json()["field"]) == (400, field)


def test_the_last_prompt_positions_alone_are_scored_when_asked_so(raw: httpx.Client) -> None:
    body = asked(sampler(raw), prompt_logprobs=True, prompt_logprobs_last_n=1, topk_prompt_logprobs=2)
    answer = pb.SampleResponse.FromString(result(raw, ok(raw.post("/asample", json=body))).content)
    scores = struct.unpack("<3f", answer.prompt_logprobs)
    assert [math.isnan(score) for score in scores] == [True, True, False]
    assert struct.unpack("<6f", answer.topk_prompt_logprobs.logprobs)[:4] == (-99999.0,) * 4


def test_a_copy_that_is_asked_for_again_is_the_same_copy(gateway: Gateway, raw: httpx.Client) -> None:
    model = new_model(raw)
    saved = ok(raw.post("/save_weights", json={"model_id": model, "seq_id": 1, "path": "once"}))
    path = result(raw, saved).json()["path"]
    body = {
        "source_path": path,
        "destination_project_id": gateway.in_unit(lambda unit: unit.keys.ensure_project("mine")),
    }
    key = {"X-Idempotency-Key": f"copy-{model}"}
    copies = [ok(raw.post("/copy_weights", json=body, headers=key))["tinker_path"] for _ in range(2)]
    assert copies[0] == copies[1] != path
    assert ok(raw.post("/copy_weights", json=body))["tinker_path"] not in copies
    other = raw.post("/copy_weights", json={**body, "ttl_seconds": 7200}, headers=key)
    assert (other.status_code, other.json()["code"]) == (400, "idempotency_key_reused")
    token = raw.post("/copy_weights", json={**body, "weights_access_token": "x"})
    assert (token.status_code, token.json()["field"]) == (400, "weights_access_token")


@pytest.mark.parametrize("encoding", ["identity", "zstd"])
def test_a_batch_that_is_too_large_has_had_its_turn_and_no_step_is_taken_without_it(
    gateway: Gateway, encoding: str
) -> None:
    key = limit(gateway, key_of(gateway), body_bytes=4000)
    with connect(gateway, key) as raw:
        model = new_model(raw)
        ok(post_batch(raw, batch(model, 1)))
        content = batch(model, 2, 500)
        if encoding == "zstd":
            content = zstandard.compress(content)
            assert len(content) < 4000
        large = post_batch(raw, content, **{"Content-Encoding": encoding})
        assert (large.status_code, large.json()["details"]) == (413, {"limit": 4000})
        step = {"model_id": model, "adam_params": {"learning_rate": 1e-4}}
        refused = result(raw, ok(raw.post("/optim_step", json={**step, "seq_id": 3}))).json()
        assert "incomplete" in refused["error"]
        ok(post_batch(raw, batch(model, 4)))
        assert "error" not in result(raw, ok(raw.post("/optim_step", json={**step, "seq_id": 5}))).json()


def test_a_forward_that_is_too_large_breaks_no_step(gateway: Gateway) -> None:
    key = limit(gateway, key_of(gateway), body_bytes=4000)
    with connect(gateway, key) as raw:
        model = new_model(raw)
        ok(post_batch(raw, batch(model, 1)))
        message = pb.ForwardBackwardRequest.FromString(batch(model, 2, 500))
        message.forward_only = True
        assert post_batch(raw, message.SerializeToString()).status_code == 413
        step = {"model_id": model, "seq_id": 3, "adam_params": {"learning_rate": 1e-4}}
        assert "error" not in result(raw, ok(raw.post("/optim_step", json=step))).json()
