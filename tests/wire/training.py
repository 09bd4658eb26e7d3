"""The few calls that most wire tests start with."""

from typing import Any

import httpx

BASE = "scripted"


def datum(length: int = 4, token: int = 97) -> dict[str, Any]:
    return {
        "model_input": [token + index for index in range(length)],
        "loss_fn_inputs": {
            "target_tokens": [token + 1 + index for index in range(length)],
            "weights": [1.0] * length,
        },
    }


def new_session(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post("/sessions", json={"base_model": BASE, "lora": {"rank": 8}, **body})
    assert response.status_code == 201, response.text
    return response.json()


def submit(client: httpx.Client, session: str, verb: str, **body: Any) -> dict[str, Any]:
    response = client.post(f"/sessions/{session}/{verb}", json=body)
    assert response.status_code == 202, response.text
    return response.json()


def finish(client: httpx.Client, operation: str) -> dict[str, Any]:
    while True:
        answer = client.get(f"/operations/{operation}", params={"wait": 20}).json()
        if answer["status"] not in ("queued", "running"):
            return answer


def run(client: httpx.Client, session: str, verb: str, **body: Any) -> dict[str, Any]:
    operation = finish(client, submit(client, session, verb, **body)["id"])
    assert operation["status"] == "completed", operation
    return operation


def trained_session(client: httpx.Client, **body: Any) -> str:
    """Return a session with one step and one published version."""
    session = new_session(client, **body)["id"]
    run(client, session, "forward_backward", data=[datum()])
    run(client, session, "optim_step")
    run(client, session, "save_weights")
    return session


def usage_of(client: httpx.Client, session: str) -> dict[str, int]:
    rows = client.get("/usage", params={"session_id": session}).json()["data"]
    return {row["meter"]: row["quantity"] for row in rows}
