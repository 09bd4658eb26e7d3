"""One project with one of everything, made over HTTP: what the matrix asks for, and what a stranger must not see."""

from collections.abc import Mapping
from typing import Any

import httpx

from tests.wire.gateways import Gateway
from tests.wire.sagemaker_clients import HUB_ARN, OUTPUT, ROLE
from tests.wire.signing import Signed
from tests.wire.training import BASE, datum, run

_ARN = "arn:aws:sagemaker:us-east-1:000000000000"

World = Mapping[str, str]
"""Ids by what they are of."""

ADAPTERS = ("adapter", "adapter_alias", "adapter_id", "adapter_path", "adapter_arn")
STATES = ("state", "state_alias", "state_id", "native_state_path", "state_arn")
"""The spellings of one published adapter and of one state."""
SIGNED_SESSIONS = ("signed_session", "session_name", "session")


def build(gateway: Gateway, key: str, name: str) -> World:
    """Make a session with an adapter and a state, a Tinker program with a model, checkpoints and a sampler, and a
    SageMaker session that runs and one that ended."""
    project = gateway.in_unit(lambda unit: unit.keys.ensure_project(name))
    with gateway.client(key) as client:
        world = {"project": project, **_native(client, name)}
    with httpx.Client(base_url=f"{gateway.url}/tinker/api/v1", headers={"X-API-Key": key}, timeout=60) as client:
        world |= _tinker(client, name)
    with httpx.Client(base_url=f"{gateway.url}/sagemaker", auth=Signed(key), timeout=60) as client:
        return {**world, **_signed(client, name)}


def nobody() -> World:
    """Return ids of the same form that nothing has."""
    group, client, session = "nobody-group", f"client-{'0' * 26}", f"sess-{'0' * 26}"
    model = f"{client}:train:0"
    return {
        "project": f"proj-{'0' * 26}",
        "session": session,
        "session_name": "nobody-session",
        "operation": f"op-{'0' * 26}",
        "group": group,
        "event": f"evt-{'0' * 26}",
        **_spellings("adapter", f"{group}@1", f"{group}@kept", f"ver-{'0' * 26}", session, "sampler_weights", "a"),
        **_spellings("state", f"{group}@2", f"{group}@resume", f"ver-{'1' * 26}", session, "weights", "s"),
        "client": client,
        "model": model,
        "tinker_operation": f"op-{'1' * 26}",
        "sampler": f"{client}:sample:0",
        "sample": f"smp-{'0' * 26}",
        "state_name": "nobody-rest",
        "exported_name": "nobody-outside",
        "spare_name": "nobody-spare",
        "state_path": f"tinker://{model}/weights/nobody-rest",
        "sampler_path": f"tinker://{model}/sampler_weights/nobody-drawn",
        "group_arn": f"{_ARN}:model-package-group/{group}",
        "signed_session": "nobody-signed",
        "signed_ended": "nobody-ended",
        "signed_operation": f"op-{'2' * 26}",
        "signed_package": f"{_ARN}:model-package/nobody-signed/2",
        "signed_sample": f"smp-{'1' * 26}",
    }


def _native(client: httpx.Client, name: str) -> dict[str, str]:
    group = f"{name}-group"
    opened = client.post(
        "/sessions",
        json={
            "base_model": BASE,
            "name": f"{name}-session",
            "lora": {"rank": 8},
            "model_package_group": group,
            "ttl_seconds": 3600,
        },
    )
    session = opened.json()["id"]
    run(client, session, "forward_backward", data=[datum()])
    run(client, session, "optim_step")
    adapter = run(client, session, "save_weights", name="a")["result"]
    state = run(client, session, "save_state", name="s")["result"]
    for alias, version in (("kept", adapter), ("resume", state)):
        answer = client.put(f"/model_packages/{group}/aliases/{alias}", json={"version": version["number"]})
        assert answer.status_code == 200, answer.text
    kept, resume = f"{group}@kept", f"{group}@resume"
    budget = client.put(f"/budgets/session/{session}", json={"hard_nanos": 10**15})
    assert budget.status_code == 200, budget.text
    return {
        "session": session,
        "session_name": f"{name}-session",
        "operation": run(client, session, "forward", data=[datum()])["id"],
        "group": group,
        "event": client.get(f"/model_packages/{group}/history").json()["data"][0]["id"],
        **_spellings("adapter", adapter["version"], kept, adapter["version_id"], session, "sampler_weights", "a"),
        **_spellings("state", state["version"], resume, state["version_id"], session, "weights", "s"),
    }


def _spellings(kind: str, address: str, alias: str, id: str, session: str, space: str, name: str) -> dict[str, str]:
    group, _, number = address.partition("@")
    path = "adapter_path" if kind == "adapter" else "native_state_path"
    return {
        kind: address,
        f"{kind}_alias": alias,
        f"{kind}_id": id,
        path: f"tinker://{session}/{space}/{name}",
        f"{kind}_arn": f"{_ARN}:model-package/{group}/{number}",
    }


def _tinker(client: httpx.Client, name: str) -> dict[str, str]:
    program = _ok(client.post("/create_session", json={"tags": [], "sdk_version": "0"}))["session_id"]
    asked = {"session_id": program, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 8}}
    model = _ok(client.post("/create_model", json=asked))["model_id"]
    saved = _ok(client.post("/save_weights", json={"model_id": model, "seq_id": 1, "path": f"{name}-rest"}))[
        "request_id"
    ]
    state_path = _result(client, saved).json()["path"]
    future = _ok(client.post("/save_weights_for_sampler", json={"model_id": model, "seq_id": 2, "path": "drawn"}))
    sampler_path = _result(client, future["request_id"]).json()["path"]
    asked = {"model_id": model, "seq_id": 4, "path": f"{name}-spare"}
    spare = _ok(client.post("/save_weights", json=asked))["request_id"]
    asked = {"model_id": model, "seq_id": 3, "path": f"{name}-outside"}
    exported = _ok(client.post("/save_weights_external", json=asked))["request_id"]
    for request_id in (exported, spare):
        _result(client, request_id)
    asked = {"session_id": program, "sampling_session_seq_id": 0, "model_path": sampler_path}
    sampler = _ok(client.post("/create_sampling_session", json=asked))["sampling_session_id"]
    question = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [97]}]},
        "sampling_params": {"max_tokens": 1},
    }
    sample = _ok(client.post("/asample", json=question))["request_id"]
    _result(client, sample)
    return {
        "client": program,
        "model": model,
        "tinker_operation": saved,
        "sampler": sampler,
        "sample": sample,
        "state_name": f"{name}-rest",
        "exported_name": f"{name}-outside",
        "spare_name": f"{name}-spare",
        "state_path": state_path,
        "sampler_path": sampler_path,
    }


def _signed(client: httpx.Client, name: str) -> dict[str, str]:
    def control(target: str, document: dict[str, Any]) -> Any:
        return _ok(client.post("/", headers={"X-Amz-Target": f"SageMaker.{target}"}, json=document))

    session, ended = f"{name}-signed", f"{name}-ended"
    for one in (session, ended):
        asked = {
            "TrainingSessionName": one,
            "LoraConfig": {"Rank": 8, "Alpha": 16},
            "RoleArn": ROLE,
            "ModelConfig": {"BaseModelArn": HUB_ARN},
            "OutputConfig": {"S3Location": {"Path": OUTPUT}},
        }
        control("CreateTrainingSession", asked)
    control("StopTrainingSession", {"TrainingSessionName": ended})
    path = f"/v1/training-sessions/{session}"

    def run(kind: str, config: Mapping[str, Any], **more: Any) -> tuple[str, Any]:
        asked = {"operationConfig": config, **more}
        operation = _ok(client.post(f"{path}/{kind}", json=asked))["operationId"]
        while (answer := _ok(client.get(f"{path}/{kind}/{operation}")))["status"] in ("Pending", "InProgress"):
            pass
        assert answer["status"] == "Completed", answer
        return operation, answer["operationResult"]

    saved, _ = run("operations", {"saveWeights": {}}, sequenceNumber=1)
    _, state = run("operations", {"saveState": {}}, sequenceNumber=2)
    prompt = {"chunks": [{"tokens": [97], "type": "encoded_text"}]}
    sample, _ = run("sampling-operations", {"computeLogprobs": {"prompt": prompt}})
    return {
        "group_arn": f"{_ARN}:model-package-group/{name}-group",
        "signed_session": session,
        "signed_ended": ended,
        "signed_operation": saved,
        "signed_package": state["saveState"]["modelPackageArn"],
        "signed_sample": sample,
    }


def _result(client: httpx.Client, request_id: str) -> httpx.Response:
    while True:
        response = client.post("/retrieve_future", json={"request_id": request_id, "allow_metadata_only": True})
        if "json" not in response.headers["content-type"] or response.json().get("type") != "try_again":
            assert response.status_code == 200, response.text
            return response


def _ok(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()
