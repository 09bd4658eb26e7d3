"""The native dialect on the way that goes well: golden bodies, order, long polls, idempotency."""

import re
import threading
import time
from typing import Any

import httpx
import pytest

from gateway.wire.native.schemas.model_packages import VersionRead
from gateway.wire.native.schemas.operations import OperationRead
from gateway.wire.native.schemas.sampling import LogprobsRead, SampleRead
from gateway.wire.native.schemas.sessions import SessionRead
from tests.wire.gateways import UNTRAINED, Gateway
from tests.wire.training import BASE, datum, finish, new_session, run, submit, trained_session, usage_of

STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")


def golden(value: Any) -> Any:
    """Replace what differs from run to run: ids, times, seeds, hashes."""
    if isinstance(value, dict):
        return {key: golden(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [golden(inner) for inner in value]
    if isinstance(value, str):
        value = STAMP.sub("TIME", value)
        value = re.sub(r"(sess|op|ver|smp)-[0-9a-z]{26}", r"\1-ID", value)
        return re.sub(r"\b[0-9a-f]{64}\b", "SHA256", re.sub(r"lp-[0-9a-f]{16}", "lp-HASH", value))
    return value


def test_a_new_session_reads_back_in_full(client: httpx.Client) -> None:
    created = new_session(client, name="golden", ttl_seconds=3600, user_metadata={"run": "7"})
    seed = created["lora"].pop("seed")
    assert 0 <= seed < 2**53
    assert golden(created) == {
        "id": "sess-ID",
        "name": "golden",
        "base_model": BASE,
        "lora": {
            "rank": 8,
            "alpha": 64.0,
            "train_attn": True,
            "train_mlp": True,
            "train_unembed": False,
            "use_rslora": False,
        },
        "model_package_group": "sess-ID",
        "status": "running",
        "activity": "idle",
        "created_at": "TIME",
        "last_used_at": "TIME",
        "expires_at": "TIME",
        "ttl_seconds": 3600,
        "user_metadata": {"run": "7"},
        "applied_seq": 0,
        "optimizer_step": 0,
        "latest_version": None,
        "latest_version_id": None,
        "failure": None,
        "recovered_seq": None,
        "replay_note": None,
        "order": "strict",
        "tokens": 0,
        "cost_nanos": 0,
    }
    assert created["model_package_group"] == created["id"]
    for reference in (created["id"], "golden"):
        read = client.get(f"/sessions/{reference}").json()
        read["lora"].pop("seed")
        assert read == created
    stopped = client.delete("/sessions/golden")
    assert (stopped.status_code, stopped.json()["status"]) == (200, "stopped")
    assert client.delete("/sessions/golden").json() == stopped.json()


def test_one_training_step_runs_in_order_and_says_what_it_used(client: httpx.Client, session: str) -> None:
    first = submit(client, session, "forward_backward", data=[datum(4), datum(3)])
    second = submit(client, session, "optim_step", adam_params={"learning_rate": 1e-3})
    assert golden({**first, "status": "", "started_at": None, "queue_position": None}) == {
        "id": "op-ID",
        "session_id": "sess-ID",
        "seq": 1,
        "kind": "forward_backward",
        "status": "",
        "created_at": "TIME",
        "started_at": None,
        "finished_at": None,
        "queue_position": None,
        "waits_for_seq": None,
        "progress": None,
        "result": None,
        "error": None,
        "usage": {},
        "cost_nanos": 0,
    }
    done = finish(client, first["id"])
    assert (done["status"], done["usage"], done["cost_nanos"]) == ("completed", {"train": 7}, 7 * 600)
    outputs = done["result"]["loss_fn_outputs"]
    assert [output["logprobs"]["shape"] for output in outputs] == [[4], [3]]
    assert {output["logprobs"]["dtype"] for output in outputs} == {"float32"}
    assert all(-2 < value <= -1 for output in outputs for value in output["logprobs"]["data"])
    stepped = finish(client, second["id"])
    assert stepped["result"]["type"] == "optim_step"
    assert (stepped["seq"], stepped["result"]["optimizer_step"], stepped["usage"]) == (2, 1, {})
    after = client.get(f"/sessions/{session}").json()
    assert (after["applied_seq"], after["optimizer_step"]) == (2, 1)
    assert usage_of(client, session) == {"train": 7}
    for operation in (done, stepped):
        OperationRead.model_validate_json(client.get(f"/operations/{operation['id']}").content)


def test_every_save_is_a_version_that_then_answers(client: httpx.Client, session: str) -> None:
    saved = []
    for _ in range(2):
        run(client, session, "forward_backward", data=[datum()])
        run(client, session, "optim_step")
        saved.append(run(client, session, "save_weights")["result"])
        answer = client.post(f"/sessions/{session}/sample", json={"prompt": [97], "max_tokens": 4, "seed": 1}).json()
        assert (answer["version"], answer["version_id"]) == (saved[-1]["version"], saved[-1]["version_id"])
    assert [row["number"] for row in saved] == [1, 2]
    assert saved[0]["version"] == f"{session}@1"
    version = client.get(f"/model_packages/{session}/2").json()
    VersionRead.model_validate(version)
    assert (version["state"], version["kind"], version["seq"], version["optimizer_step"]) == (
        "published",
        "adapter",
        6,
        2,
    )
    assert version["fingerprint"] == f"lp-{version['manifest_sha256'][:16]}"
    assert version["canary"]["max_difference"] <= version["canary"]["tolerance"]
    pinned = client.post(
        f"/sessions/{session}/sample", json={"prompt": [97], "max_tokens": 4, "seed": 1, "version": f"{session}@1"}
    ).json()
    assert pinned["version"] == f"{session}@1"
    assert pinned["fingerprint"] != version["fingerprint"]
    assert client.get(f"/sessions/{session}").json()["latest_version"] == f"{session}@2"
    page = client.get(f"/model_packages/{session}").json()
    assert [row["number"] for row in page["data"]] == [2, 1]
    groups = {row["name"]: row for row in client.get("/model_packages").json()["data"]}
    assert (groups[session]["versions"], groups[session]["latest"]) == (2, {"adapter": 2})


def test_a_state_loads_into_another_session(client: httpx.Client, session: str) -> None:
    run(client, session, "forward_backward", data=[datum()])
    run(client, session, "optim_step")
    state = run(client, session, "save_state", description="after one step")["result"]
    assert client.get(f"/model_packages/{session}/1").json()["description"] == "after one step"
    other = new_session(client)["id"]
    loaded = run(client, other, "load_state", version=state["version"])["result"]
    assert loaded == {
        "type": "load_state",
        "version_id": state["version_id"],
        "optimizer_step": 1,
        "discarded_gradient": False,
    }


def test_a_lazily_saved_version_goes_through_the_gate_at_its_first_use(client: httpx.Client, session: str) -> None:
    run(client, session, "forward_backward", data=[datum()])
    run(client, session, "optim_step")
    run(client, session, "save_weights", publish="lazy")
    assert client.get(f"/model_packages/{session}/1").json()["state"] == "staged"
    answer = client.post("/sample", json={"version": f"{session}@1", "prompt": [97], "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    version = client.get(f"/model_packages/{session}/1").json()
    assert version["state"] == "published"
    assert answer.json()["fingerprint"] == version["fingerprint"]


def test_a_sample_says_its_version_its_tokens_and_its_price(client: httpx.Client, published: str) -> None:
    before = usage_of(client, published)
    response = client.post(
        f"/sessions/{published}/sample",
        json={
            "prompt": [97, 98, 99],
            "num_samples": 2,
            "max_tokens": 5,
            "seed": 3,
            "ignore_eos": True,
            "prompt_logprobs": True,
            "topk_prompt_logprobs": 2,
        },
    )
    answer = response.json()
    SampleRead.model_validate_json(response.content)
    assert set(answer) == {
        "id", "base_model", "version", "version_id", "fingerprint", "sequences", "prompt_logprobs",
        "topk_prompt_logprobs", "usage", "cost_nanos",
    }  # fmt: skip
    assert [len(sequence["tokens"]) for sequence in answer["sequences"]] == [5, 5]
    assert [len(sequence["logprobs"]) for sequence in answer["sequences"]] == [5, 5]
    assert {sequence["stop_reason"] for sequence in answer["sequences"]} == {"length"}
    assert answer["sequences"][0]["tokens"] != answer["sequences"][1]["tokens"]
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == len(answer["topk_prompt_logprobs"]) == 3
    assert [len(row) for row in answer["topk_prompt_logprobs"][1:]] == [2, 2]
    assert answer["usage"] == {"prefill": 3, "cached_prefill": 0, "sample": 10}
    assert answer["cost_nanos"] == 3 * 100 + 10 * 300
    after = usage_of(client, published)
    assert after["sample"] - before.get("sample", 0) == 10
    assert after["prefill"] - before.get("prefill", 0) == 3


def test_a_scored_prompt_costs_its_prompt_alone(client: httpx.Client, session: str, published: str) -> None:
    before = usage_of(client, published)
    response = client.post(f"/sessions/{published}/logprobs", json={"prompt": [97, 98, 99]})
    LogprobsRead.model_validate_json(response.content)
    answer = response.json()
    assert answer["logprobs"][0] is None
    assert len(answer["logprobs"]) == 3
    assert answer["usage"] == {"prefill": 3, "cached_prefill": 0, "sample": 0}
    assert usage_of(client, published).get("sample", 0) == before.get("sample", 0)
    base = client.post("/logprobs", json={"prompt": [97, 98, 99], "base_model": BASE}).json()
    assert (base["version"], base["fingerprint"]) == (None, f"base-{BASE}")
    assert base["logprobs"] != answer["logprobs"]


def test_the_same_key_and_body_make_one_session_and_another_body_is_refused(client: httpx.Client) -> None:
    headers = {"Idempotency-Key": "session-1"}
    body = {"base_model": BASE, "lora": {"rank": 4}}
    first = client.post("/sessions", json=body, headers=headers)
    again = client.post("/sessions", json=body, headers=headers)
    other = client.post("/sessions", json={**body, "lora": {"rank": 5}}, headers=headers)
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.json() == first.json()
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")


def test_a_repeated_seq_or_key_returns_the_operation_already_there(client: httpx.Client) -> None:
    session = new_session(client, base_model=UNTRAINED)["id"]
    body = {"seq": 1, "data": [datum()]}
    first = submit(client, session, "forward_backward", **body)
    assert submit(client, session, "forward_backward", **body)["id"] == first["id"]
    reused = client.post(f"/sessions/{session}/forward_backward", json={"seq": 1, "data": [datum(3)]})
    assert (reused.status_code, reused.json()["error"]["code"]) == (409, "sequence_reused")
    headers = {"Idempotency-Key": "step-1"}
    keyed = client.post(f"/sessions/{session}/optim_step", json={}, headers=headers).json()
    assert client.post(f"/sessions/{session}/optim_step", json={}, headers=headers).json()["id"] == keyed["id"]
    other = client.post(f"/sessions/{session}/save_state", json={}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")
    rows = client.get(f"/sessions/{session}/operations").json()["data"]
    assert [(row["seq"], row["kind"]) for row in rows] == [(1, "forward_backward"), (2, "optim_step")]


def test_a_later_seq_waits_for_the_missing_one_and_says_so(client: httpx.Client) -> None:
    session = new_session(client, base_model=UNTRAINED)["id"]
    late = submit(client, session, "optim_step", seq=3)
    early = submit(client, session, "forward_backward", seq=1, data=[datum()])
    assert client.get(f"/operations/{late['id']}").json()["waits_for_seq"] == 2
    assert client.get(f"/operations/{early['id']}").json()["waits_for_seq"] is None
    stopped = client.delete(f"/sessions/{session}").json()
    assert stopped["status"] == "stopped"
    skipped = client.get(f"/operations/{late['id']}").json()
    assert (skipped["status"], skipped["error"]["code"]) == ("skipped", "operation_skipped")


def test_operations_page_by_seq(client: httpx.Client) -> None:
    session = new_session(client, base_model=UNTRAINED)["id"]
    for _ in range(5):
        submit(client, session, "optim_step")
    first = client.get(f"/sessions/{session}/operations", params={"limit": 2}).json()
    second = client.get(f"/sessions/{session}/operations", params={"limit": 3, "after_seq": first["next"]}).json()
    assert [row["seq"] for row in first["data"] + second["data"]] == [1, 2, 3, 4, 5]
    last = client.get(f"/sessions/{session}/operations", params={"after_seq": 5}).json()
    assert last == {"data": [], "next": None}


def test_sessions_page_newest_first(gateway: Gateway) -> None:
    with gateway.client(gateway.keys.stranger) as stranger:
        ids = [new_session(stranger)["id"] for _ in range(3)]
        first = stranger.get("/sessions", params={"limit": 2}).json()
        second = stranger.get("/sessions", params={"limit": 2, "after": first["next"]}).json()
    assert [row["id"] for row in first["data"] + second["data"]][:3] == ids[::-1]
    for row in first["data"]:
        SessionRead.model_validate(row)


def test_a_long_poll_returns_as_soon_as_the_operation_is_final(client: httpx.Client) -> None:
    session = new_session(client, base_model=UNTRAINED)["id"]
    operation = submit(client, session, "optim_step")["id"]
    started = time.monotonic()
    unchanged = client.get(f"/operations/{operation}", params={"wait": 0.3})
    waited = time.monotonic() - started
    assert (unchanged.json()["status"], unchanged.json()["queue_position"]) == ("queued", 0)
    assert 0.3 <= waited < 3
    timer = threading.Timer(0.2, lambda: client.delete(f"/sessions/{session}"))
    started = time.monotonic()
    timer.start()
    final = client.get(f"/operations/{operation}", params={"wait": 30}).json()
    timer.join()
    assert final["status"] == "skipped"
    assert time.monotonic() - started < 5


def test_a_sample_repeated_under_its_key_is_answered_and_paid_once(client: httpx.Client) -> None:
    session = trained_session(client)
    headers = {"Idempotency-Key": f"sample-{session}"}
    body = {"prompt": [97, 98], "max_tokens": 6, "ignore_eos": True}
    path = f"/sessions/{session}/sample"
    answers: list[bytes] = []

    def ask() -> None:
        answers.append(client.post(path, json=body, headers=headers).content)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(answers)) == 1
    assert usage_of(client, session) == {"train": 4, "prefill": 2, "sample": 6}
    client.delete(f"/sessions/{session}")
    assert client.post(path, json=body, headers=headers).content == answers[0]
    other = client.post(path, json={**body, "max_tokens": 7}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")


def test_usage_adds_up_per_key_and_meter_between_two_times(client: httpx.Client, gateway: Gateway) -> None:
    session = trained_session(client)
    with gateway.client(gateway.keys.inference_only) as reader:
        sampled = reader.post(f"/sessions/{session}/sample", json={"prompt": [97], "max_tokens": 3, "ignore_eos": True})
    usage = client.get("/usage", params={"session_id": session}).json()
    by_key = {(row["key_id"], row["meter"]): row["quantity"] for row in usage["data"]}
    mine, reading = gateway.keys.owner.split("-")[1], gateway.keys.inference_only.split("-")[1]
    assert by_key == {(mine, "train"): 4, (reading, "prefill"): 1, (reading, "sample"): 3}
    assert usage["total_cost_nanos"] == 4 * 600 + sampled.json()["cost_nanos"]
    past = client.get("/usage", params={"session_id": session, "until": "2020-01-01T00:00:00Z"}).json()
    assert past == {"total_cost_nanos": 0, "data": []}
    everything = client.get("/usage", params={"session_id": session, "since": "2020-01-01T00:00:00Z"}).json()
    assert everything == usage


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_compressed_bodies_are_read(client: httpx.Client, session: str, encoding: str) -> None:
    import gzip
    import json

    import zstandard

    body = json.dumps({"data": [datum()] * 50}).encode()
    packed = gzip.compress(body) if encoding == "gzip" else zstandard.compress(body)
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    response = client.post(f"/sessions/{session}/forward", content=packed, headers=headers)
    assert response.status_code == 202, response.text
    assert finish(client, response.json()["id"])["usage"] == {"train": 200}


def test_the_openapi_page_documents_every_route_without_a_key(gateway: Gateway) -> None:
    document = httpx.get(f"{gateway.url}/training/v1/openapi.json").json()
    assert httpx.get(f"{gateway.url}/training/v1/docs").status_code == 200
    assert set(document["paths"]) == {
        "/sessions", "/sessions/{session_id}", "/sessions/{session_id}/operations", "/sessions/{session_id}/forward",
        "/sessions/{session_id}/forward_backward", "/sessions/{session_id}/optim_step",
        "/sessions/{session_id}/save_weights", "/sessions/{session_id}/save_state", "/sessions/{session_id}/load_state",
        "/sessions/{session_id}/sample", "/sessions/{session_id}/logprobs", "/sample", "/logprobs",
        "/operations/{operation_id}", "/base_models", "/base_models/{name}/tokenizer/{file}", "/model_packages",
        "/model_packages/{group}", "/model_packages/{group}/history", "/model_packages/{group}/aliases/{alias}",
        "/model_packages/{group}/{reference}", "/model_packages/{group}/{reference}/undelete",
        "/model_packages/{group}/{reference}/verify", "/versions", "/versions/{address}", "/usage",
        "/statements/{month}", "/estimate", "/audit",
        "/model_packages/{group}/{reference}/export", "/model_packages/{group}/import",
        "/downloads/{project_id}/{version_id}/{file}", "/budgets", "/budgets/{scope}/{scope_id}",
    }  # fmt: skip
    assert all("summary" in method for path in document["paths"].values() for method in path.values())
