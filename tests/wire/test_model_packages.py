"""Model packages over the native surface: spellings, aliases, labels, deletion, verification, and who may do what."""

from typing import Any

import httpx
import pytest

from tests.wire.gateways import Gateway
from tests.wire.training import datum, finish, new_session, run, submit, trained_session

PROMPT = [97, 98, 99]


def sampled(client: httpx.Client, version: str) -> httpx.Response:
    return client.post("/sample", json={"version": version, "prompt": PROMPT, "max_tokens": 4, "seed": 1})


def read(client: httpx.Client, address: str) -> dict[str, Any]:
    response = client.get(f"/versions/{address}")
    assert response.status_code == 200, response.text
    return response.json()


def test_four_spellings_and_the_id_name_one_row(client: httpx.Client) -> None:
    session = new_session(client)["id"]
    run(client, session, "forward_backward", data=[datum()])
    run(client, session, "optim_step")
    run(client, session, "save_weights", name="first", tags=["eval"], user_metadata={"run": "a"})
    assert client.put(f"/model_packages/{session}/aliases/champion", json={"version": 1}).status_code == 200

    version = client.get(f"/model_packages/{session}/1").json()
    spellings = [
        f"{session}@1",
        f"{session}@champion",
        f"{session}@latest",
        f"tinker://{session}/sampler_weights/first",
        f"tinker://{session}/sampler_weights/{version['id']}",
        f"arn:aws:sagemaker:us-west-2:123456789012:model-package/{session}/1",
        version["id"],
        version["arn"],
        version["tinker_path"],
    ]
    assert [read(client, spelling) for spelling in spellings] == [version] * len(spellings)
    answers = [sampled(client, spelling).json() for spelling in spellings]
    assert {(answer["version"], answer["fingerprint"]) for answer in answers} == {
        (f"{session}@1", version["fingerprint"])
    }
    assert (version["aliases"], version["tags"], version["name"]) == (["champion"], ["eval"], "first")
    assert (version["seq"], version["optimizer_step"], len(version["base_sha256"])) == (3, 1, 64)


@pytest.mark.parametrize(
    "spelling",
    ["{0}@2", "{0}@nobody", "tinker://{0}/weights/first", "tinker://sess-0/sampler_weights/first", "ver-0", "../{0}@1"],
)
def test_what_is_no_version_is_never_answered_by_another(client: httpx.Client, spelling: str) -> None:
    session = trained_session(client)

    refused = sampled(client, spelling.format(session))

    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "unknown_version")


def test_every_answer_says_in_its_headers_which_weights_gave_it(client: httpx.Client) -> None:
    session = trained_session(client)
    fingerprint = read(client, f"{session}@1")["fingerprint"]
    body = {"prompt": PROMPT, "max_tokens": 2}
    scoring = {"prompt": PROMPT}
    key = {"Idempotency-Key": f"headers-{session}"}

    answers = [
        client.post(f"/sessions/{session}/sample", json=body, headers=key),
        client.post(f"/sessions/{session}/sample", json=body, headers=key),
        client.post(f"/sessions/{session}/logprobs", json=scoring),
        client.post("/logprobs", json={**scoring, "version": f"{session}@latest"}),
    ]
    base = client.post("/sample", json={**body, "base_model": "scripted"})

    for answer in answers:
        assert answer.headers["X-Loopline-Version"] == answer.json()["version"] == f"{session}@1"
        assert answer.headers["X-Loopline-Fingerprint"] == answer.json()["fingerprint"] == fingerprint
    assert base.headers["X-Loopline-Version"] == "base:scripted"
    assert base.headers["X-Loopline-Fingerprint"] == base.json()["fingerprint"] == "base-scripted"


def test_an_alias_moves_and_openai_answers_name_the_version_behind_it(
    client: httpx.Client, openai_client: httpx.Client
) -> None:
    session = trained_session(client)
    run(client, session, "forward_backward", data=[datum()])
    run(client, session, "optim_step")
    run(client, session, "save_weights")
    seen = []
    for number in (1, 2):
        client.put(f"/model_packages/{session}/aliases/live", json={"version": f"{session}@{number}"})
        answer = openai_client.post("/completions", json={"model": f"{session}@live", "prompt": "ab", "max_tokens": 2})
        assert answer.headers["X-Loopline-Version"] == f"{session}@{number}"
        assert answer.json()["system_fingerprint"] == read(client, f"{session}@{number}")["fingerprint"]
        seen.append(answer.json()["system_fingerprint"])

    history = client.get(f"/model_packages/{session}/history").json()["data"]
    path = f"/model_packages/{session}/history"
    page = client.get(path, params={"limit": 1}).json()
    assert page == {"data": history[:1], "next": history[0]["id"]}
    assert client.get(path, params={"after": page["next"]}).json() == {"data": history[1:], "next": None}
    group = next(group for group in client.get("/model_packages").json()["data"] if group["name"] == session)
    assert len(set(seen)) == 2
    assert [(line["event"], line["version"], line["previous"]) for line in history] == [
        ("aliased", f"{session}@2", 1),
        ("aliased", f"{session}@1", None),
    ]
    assert (group["aliases"], group["latest"], group["versions"]) == ({"live": 2}, {"adapter": 2}, 2)
    assert group["size_bytes"] > 0


def test_a_deleted_version_is_refused_everywhere_until_it_is_brought_back(
    client: httpx.Client, openai_client: httpx.Client
) -> None:
    session = trained_session(client)
    before = sampled(client, f"{session}@1").json()["sequences"]
    refused = client.delete(f"/model_packages/{session}/1")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "version_in_use")

    assert client.delete(f"/model_packages/{session}/1", params={"force": True}).status_code == 200

    answers = [
        sampled(client, f"{session}@1"),
        client.post(f"/sessions/{session}/sample", json={"prompt": PROMPT, "max_tokens": 1}),
        client.post(f"/model_packages/{session}/1/verify"),
        client.put(f"/model_packages/{session}/aliases/a", json={"version": 1}),
    ]
    assert {(answer.status_code, answer.json()["error"]["code"]) for answer in answers} == {(404, "version_deleted")}
    chat = openai_client.post("/completions", json={"model": f"{session}@1", "prompt": "a", "max_tokens": 1})
    assert (chat.status_code, chat.json()["error"]["code"]) == (404, "model_not_found")
    assert client.get(f"/model_packages/{session}").json()["data"] == []
    assert len(client.get(f"/model_packages/{session}", params={"deleted": True}).json()["data"]) == 1

    assert client.post(f"/model_packages/{session}/1/undelete").json()["deleted_at"] is None
    assert sampled(client, f"{session}@1").json()["sequences"] == before


def test_a_version_expires_and_its_labels_can_be_changed(client: httpx.Client) -> None:
    session = new_session(client)["id"]
    run(client, session, "save_state", ttl_seconds=3600, description="short-lived")

    edited = client.patch(f"/model_packages/{session}/1", json={"ttl_seconds": None, "tags": ["b", "a"]}).json()

    assert (edited["ttl_seconds"], edited["expires_at"], edited["tags"]) == (None, None, ["a", "b"])
    assert edited["description"] == "short-lived"
    assert [
        one["id"] for one in client.get("/versions", params={"tag": "a", "session_id": session}).json()["data"]
    ] == [edited["id"]]
    assert client.patch(f"/model_packages/{session}/1", json={"ttl_seconds": 1}).status_code == 200
    while client.get(f"/model_packages/{session}/1").json()["deleted_at"] is None:
        pass  # the sweep runs every second
    loading = client.post(f"/sessions/{session}/load_state", json={"version": f"{session}@1"})
    assert (loading.status_code, loading.json()["error"]["code"]) == (404, "version_expired")


def test_verification_answers_with_the_figures_that_are_stored_and_exported(
    client: httpx.Client, gateway: Gateway
) -> None:
    session = trained_session(client)

    verified = client.post(f"/model_packages/{session}/1/verify").json()

    version = read(client, f"{session}@1")
    [check] = version["checks"]
    assert verified == {"version": f"{session}@1", "passed": True, "checks": [check]}
    assert (check["occasion"], check["passed"], check["failure"]) == ("verify", True, None)
    assert check["report"]["mean_difference"] <= check["report"]["mean_tolerance"] <= check["report"]["tolerance"]
    assert version["canary"]["engine"] == check["engine"] == check["report"]["engine"]
    exported = httpx.get(f"{gateway.url}/metrics").text
    counted = [line for line in exported.splitlines() if line.startswith("loopline_gate_checks_total")]
    assert any('occasion="verify"' in line and 'verdict="passed"' in line for line in counted)
    assert "loopline_gate_mean_difference_nats_bucket" in exported


def test_a_published_version_whose_files_changed_is_found_on_demand_and_not_served(
    client: httpx.Client, gateway: Gateway
) -> None:
    session = trained_session(client)
    location = gateway.in_unit(lambda unit: _location(unit, gateway, session, client))
    file = next((gateway.settings.artifact_dir / location).glob("scripted.json"))
    file.write_text(file.read_text() + " ")

    verified = client.post(f"/model_packages/{session}/1/verify").json()
    refused = sampled(client, f"{session}@1")

    assert verified["passed"] is False
    assert "scripted.json" in verified["checks"][0]["failure"]
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "version_failed_check")


async def _location(unit: Any, gateway: Gateway, session: str, client: httpx.Client) -> str:
    version_id = read(client, f"{session}@1")["id"]
    principal = await unit.keys.get(gateway.keys.owner.split("-")[1])
    return (await unit.versions.get(principal.project_id, version_id)).location


def test_a_name_is_used_once_per_session_and_kind(client: httpx.Client) -> None:
    session = new_session(client)["id"]
    saved = run(client, session, "save_state", name="only")["result"]
    assert (saved["seq"], saved["optimizer_step"]) == (1, 0)

    refused = client.post(f"/sessions/{session}/save_state", json={"name": "only"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "version_name_taken")
    first = submit(client, session, "save_state", name="racing")["id"]
    second = client.post(f"/sessions/{session}/save_state", json={"name": "racing"})
    assert finish(client, first)["status"] == "completed"
    if second.status_code == 202:  # the first was not saved yet: then the second finds out when it is
        assert finish(client, second.json()["id"])["error"]["code"] == "version_name_taken"
    else:
        assert second.json()["error"]["code"] == "version_name_taken"
    run(client, session, "save_weights", name="only")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("PUT", "/aliases/latest", {"version": 1}, 400, "reserved_alias"),
        ("PUT", "/aliases/1st", {"version": 1}, 400, "invalid_request"),
        ("PUT", "/aliases/a", {"version": 9}, 404, "unknown_version"),
        ("PUT", "/aliases/a", {"version": None}, 400, "invalid_request"),
        ("DELETE", "/aliases/nobody", None, 404, "alias_not_found"),
        ("PATCH", "/1", {"tags": ["a b"]}, 400, "invalid_request"),
        ("PATCH", "/1", {"ttl_seconds": 0}, 400, "invalid_request"),
        ("PATCH", "/1", {"number": 2}, 400, "invalid_request"),
        ("PATCH", "/1", {"user_metadata": {"a": 1}}, 400, "invalid_request"),
        ("DELETE", "/9", None, 404, "unknown_version"),
        ("POST", "/9/undelete", None, 404, "unknown_version"),
        ("POST", "/latest/verify", None, 409, "version_not_published"),
    ],
)
def test_what_cannot_be_done_is_refused(
    client: httpx.Client, method: str, path: str, body: Any, status: int, code: str
) -> None:
    session = new_session(client)["id"]
    run(client, session, "save_state")

    refused = client.request(method, f"/model_packages/{session}{path}", json=body)

    assert (refused.status_code, refused.json()["error"]["code"]) == (status, code), refused.text


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "POST"])
def test_a_stranger_and_an_inference_key_change_nothing(client: httpx.Client, gateway: Gateway, method: str) -> None:
    session = new_session(client)["id"]
    run(client, session, "save_state")
    path, body = {
        "PUT": ("aliases/a", {"version": 1}),
        "PATCH": ("1", {"description": "x"}),
        "DELETE": ("1?force=true", None),
        "POST": ("1/undelete", None),
    }[method]
    before = read(client, f"{session}@1")

    for key, status in ((gateway.keys.stranger, 404), (gateway.keys.inference_only, 403), (gateway.keys.unknown, 401)):
        with gateway.client(key) as other:
            assert other.request(method, f"/model_packages/{session}/{path}", json=body).status_code == status
    assert read(client, f"{session}@1") == before
