"""Limits while a gateway runs: who is over one is told which, and when to come back; others notice nothing."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from gateway.core.ids import ProjectId
from gateway.core.limits import Limit, LimitScope
from gateway.core.ports import OwnLimit, UnitOfWork
from tests.stack import EngineEndpoint
from tests.wire.gateways import Gateway, running_gateway
from tests.wire.signing import sign
from tests.wire.test_keys import key_of
from tests.wire.training import BASE, datum, new_session, run, submit

SAMPLE = "/sagemaker/training-sessions/one/sample"
WORKING = ("/training/v1/sample", "/v1/completions", "/tinker/api/v1/asample", SAMPLE)
CHAT = {"model": BASE, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def limited(scripted_engine: EngineEndpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    data_dir = tmp_path_factory.mktemp("limits") / "data"
    env = {"LOOPLINE_LIMIT_N": "3", "LOOPLINE_LIMIT_SESSIONS": "3"}
    with running_gateway(scripted_engine, data_dir, trainer=False, env=env) as started:
        yield started


def limit(gateway: Gateway, key: str, **values: int) -> str:
    """Give ``key`` limits of its own and return it."""

    async def set_all(unit: UnitOfWork) -> None:
        known = await unit.keys.get(key.split("-")[1])  # type: ignore[arg-type]
        assert known is not None
        for name, value in values.items():
            await unit.limits.set(
                OwnLimit(
                    scope=LimitScope.KEY,
                    scope_id=known.id,
                    project_id=ProjectId(known.project_id),
                    limit=Limit(name),
                    value=value,
                )
            )

    gateway.in_unit(set_all)
    return key


def test_the_request_after_the_last_is_told_when_to_come_back(limited: Gateway) -> None:
    key = limit(limited, key_of(limited), requests_per_minute=3)
    with limited.openai_client(key) as client, limited.client(key) as native:
        answers = [client.post("/chat/completions", json=CHAT) for _ in range(4)]
        refused = native.post("/sample", json={"prompt": [97], "base_model": BASE, "max_tokens": 1})
        assert native.get("/sessions").status_code == 200, "reading is free"
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers[:3]] == ["2", "1", "0"]
    assert answers[0].headers["x-ratelimit-limit-requests"] == "3"
    assert answers[3].json()["error"]["code"] == "rate_limit_exceeded"
    assert 15 <= int(answers[3].headers["Retry-After"]) <= 20
    assert refused.json()["error"]["details"] == {
        "limit": 3,
        "rate": "requests_per_minute",
        "scope": "key",
        "retry_after_s": int(refused.headers["Retry-After"]),
    }
    with limited.openai_client() as other:
        assert other.post("/chat/completions", json=CHAT).status_code == 200


def test_a_key_that_consumed_its_tokens_waits(limited: Gateway) -> None:
    key = limit(limited, key_of(limited), tokens_per_minute=4)
    with limited.openai_client(key) as client:
        statuses = [client.post("/chat/completions", json=CHAT).status_code]
        while statuses[-1] == 200:
            statuses.append(client.post("/chat/completions", json=CHAT).status_code)
        refused = client.post("/chat/completions", json=CHAT)
    assert statuses[-1] == refused.status_code == 429
    assert "tokens per minute" in refused.json()["error"]["message"]


def test_a_flood_of_large_calls_does_not_pass_the_limit_of_tokens(limited: Gateway) -> None:
    key = limit(limited, key_of(limited), tokens_per_minute=100)
    large = {"model": BASE, "prompt": [97] * 10, "max_tokens": 40, "ignore_eos": True}

    async def flood() -> list[httpx.Response]:
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=f"{limited.url}/v1", headers=headers, timeout=60) as client:
            return await asyncio.gather(*(client.post("/completions", json=large) for _ in range(12)))

    answers = asyncio.run(flood())
    assert [answer.status_code for answer in answers].count(200) == 2
    refused = [answer for answer in answers if answer.status_code != 200]
    assert {answer.status_code for answer in refused} == {429}
    assert all(1 <= int(answer.headers["Retry-After"]) <= 31 for answer in refused)


def test_what_a_call_could_have_taken_and_did_not_is_given_back(limited: Gateway) -> None:
    key = limit(limited, key_of(limited), tokens_per_minute=100)
    with limited.openai_client(key) as client:
        greedy = {"model": BASE, "prompt": [97], "temperature": 0, "return_token_ids": True}
        first = client.post("/completions", json={**greedy, "max_tokens": 1}).json()["choices"][0]["token_ids"]
        short = {**greedy, "max_tokens": 90, "stop_token_ids": first}
        statuses = [client.post("/completions", json=short).status_code for _ in range(3)]
    assert statuses == [200, 200, 200]


def test_a_stopped_session_makes_room_for_the_next(limited: Gateway) -> None:
    with limited.client() as client, limited.client(limited.keys.stranger) as other:
        opened = [new_session(client)["id"] for _ in range(3)]
        asked: dict[str, Any] = {"base_model": BASE, "lora": {"rank": 8}}
        full = client.post("/sessions", json=asked)
        assert (full.status_code, full.json()["error"]["code"]) == (429, "quota_exceeded")
        assert full.json()["error"]["details"] == {"limit": 3, "got": 3, "quota": "sessions", "scope": "project"}
        assert other.post("/sessions", json=asked).status_code == 201
        client.delete(f"/sessions/{opened[0]}")
        assert client.post("/sessions", json=asked).status_code == 201


def test_queues_have_an_end(limited: Gateway) -> None:
    key = limit(limited, key_of(limited, "queues"), queued_operations=2)
    with limited.client(key) as client:
        session = new_session(client)["id"]
        for _ in range(2):
            submit(client, session, "forward", data=[datum()])
        full = client.post(f"/sessions/{session}/forward", json={"data": [datum()]})
    assert (full.status_code, full.json()["error"]["details"]["quota"]) == (429, "queued_operations")
    assert int(full.headers["Retry-After"]) >= 1


@pytest.mark.parametrize("quota", ["versions", "stored_bytes"])
def test_what_is_kept_has_an_end(gateway: Gateway, quota: str) -> None:
    key = limit(gateway, key_of(gateway, f"keeps {quota}"), **{quota: 1})
    with gateway.client(key) as client:
        session = new_session(client)["id"]
        run(client, session, "forward_backward", data=[datum()])
        run(client, session, "optim_step")
        run(client, session, "save_weights")
        full = client.post(f"/sessions/{session}/save_weights", json={})
        assert (full.status_code, full.json()["error"]["details"]["quota"]) == (429, quota)
        assert int(full.headers["Retry-After"]) >= 1


@pytest.mark.parametrize(
    ("name", "value", "body", "field"),
    [
        ("n", 2, {"n": 3}, "n"),
        ("max_tokens", 1, {}, "max_completion_tokens"),
        ("stop", 1, {"stop": ["x", "y"]}, "stop"),
    ],
)
def test_a_request_above_a_size_is_refused_by_name(
    limited: Gateway, name: str, value: int, body: dict[str, Any], field: str
) -> None:
    key = limit(limited, key_of(limited), **{name: value})
    with limited.openai_client(key) as client:
        refused = client.post("/chat/completions", json={**CHAT, **body})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "limit_exceeded")
    assert refused.json()["error"]["param"] == field


def test_more_prompts_than_a_request_may_have_are_refused_by_name(limited: Gateway) -> None:
    key = limit(limited, key_of(limited), prompts=1)
    with limited.openai_client(key) as client:
        refused = client.post("/completions", json={"model": BASE, "prompt": ["a", "b"], "max_tokens": 1})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "limit_exceeded")
    assert refused.json()["error"]["param"] == "prompt"


def sent(gateway: Gateway, path: str, key: str, body: dict[str, Any]) -> httpx.Response:
    """Post ``body`` as the dialect of ``path`` does."""
    request = httpx.Request("POST", f"{gateway.url}{path}", json=body)
    if path == SAMPLE:
        sign(request, key)
    elif path.startswith("/tinker"):
        request.headers["X-API-Key"] = key
    else:
        request.headers["Authorization"] = f"Bearer {key}"
    with httpx.Client() as client:
        return client.send(request)


@pytest.mark.parametrize("path", WORKING)
def test_a_body_above_the_keys_limit_is_refused_by_every_dialect_with_the_number(limited: Gateway, path: str) -> None:
    key = limit(limited, key_of(limited), body_bytes=1000)
    long = sent(limited, path, key, {"prompt": [97] * 1000})
    assert (long.status_code, "larger than 1000 bytes" in long.text) == (413, True), long.text


@pytest.mark.parametrize("path", WORKING)
def test_every_dialect_says_when_to_come_back(limited: Gateway, path: str) -> None:
    key = limit(limited, key_of(limited), requests_per_minute=1)
    answers = [sent(limited, path, key, {}) for _ in range(2)]
    assert (answers[0].status_code, answers[1].status_code) in ((400, 429), (404, 429))
    assert 55 <= int(answers[1].headers["Retry-After"]) <= 60


def test_the_default_of_the_gateway_binds_every_dialect(limited: Gateway) -> None:
    with limited.openai_client() as client, limited.client() as native:
        openai = client.post("/chat/completions", json={**CHAT, "n": 4})
        sampled = native.post("/sample", json={"prompt": [97], "base_model": BASE, "max_tokens": 1, "num_samples": 4})
    assert (openai.status_code, openai.json()["error"]["param"]) == (400, "n")
    assert (sampled.status_code, sampled.json()["error"]["field"]) == (400, "num_samples")


def test_refused_requests_leave_the_gateway_alive(limited: Gateway) -> None:
    assert httpx.get(f"{limited.url}/livez").status_code == 200
