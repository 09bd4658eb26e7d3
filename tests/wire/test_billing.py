"""Money on the wire: costs in answers, budgets in each dialect's words, usage, statements, estimates."""

import csv
import io
from typing import Any

import httpx
import openai
import pytest

from billing.money import price_of
from billing.prices import PriceList, shipped_prices
from tests.wire.gateways import Gateway
from tests.wire.training import BASE, datum, new_session, run, submit, trained_session

RATES = PriceList.load(shipped_prices()).prices[1].nanos_per_million
TOO_SMALL = 10  # nano-USD


@pytest.fixture
def key_id(gateway: Gateway) -> str:
    return gateway.keys.owner.split("-")[1]


def usage(client: httpx.Client, **query: Any) -> list[dict[str, Any]]:
    answer = client.get("/usage", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def test_an_operation_says_what_it_cost_and_the_session_adds_up(client: httpx.Client, session: str) -> None:
    before = submit(client, session, "forward_backward", data=[datum(5), datum(3)])
    operation = client.get(f"/operations/{before['id']}", params={"wait": 30})
    cost = price_of(8, RATES["train"])
    assert (operation.json()["usage"], operation.json()["cost_nanos"]) == ({"train": 8}, cost)
    assert operation.headers["X-Loopline-Cost-Nanos"] == str(cost)
    assert client.get(f"/sessions/{session}").json()["cost_nanos"] == cost

    run(client, session, "optim_step")
    assert client.get(f"/sessions/{session}").json()["cost_nanos"] == cost
    listed = {row["id"]: row["cost_nanos"] for row in client.get("/sessions").json()["data"]}
    assert listed[session] == cost


def test_a_sample_costs_its_prompt_once_and_every_token(client: httpx.Client, session: str) -> None:
    body = {"prompt": [97, 98, 99], "num_samples": 3, "max_tokens": 4, "base_model": BASE}
    response = client.post("/sample", json=body, headers={"X-Loopline-Tag": "eval"})
    answer = response.json()
    sampled = sum(len(sequence["tokens"]) for sequence in answer["sequences"])
    assert answer["usage"] == {"prefill": 3, "cached_prefill": 0, "sample": sampled}
    assert answer["cost_nanos"] == price_of(3, RATES["prefill"]) + price_of(sampled, RATES["sample"])
    assert response.headers["X-Loopline-Cost-Nanos"] == str(answer["cost_nanos"])
    tagged = {row["tag"] for row in usage(client, by=["tag"])}
    assert "eval" in tagged


def test_a_completion_says_its_cost_in_usage_and_header(openai_client: httpx.Client) -> None:
    response = openai_client.post("/completions", json={"model": BASE, "prompt": "abc", "max_tokens": 4, "n": 2})
    counted = response.json()["usage"]
    cost = price_of(3, RATES["prefill"]) + price_of(counted["completion_tokens"], RATES["sample"])
    assert (counted["cost_nanos"], response.headers["X-Loopline-Cost-Nanos"]) == (cost, str(cost))


def test_scoring_pays_for_the_prompt_alone(client: httpx.Client) -> None:
    answer = client.post("/logprobs", json={"prompt": [97, 98, 99], "base_model": BASE}).json()
    assert answer["usage"] == {"prefill": 3, "cached_prefill": 0, "sample": 0}
    assert answer["cost_nanos"] == price_of(3, RATES["prefill"])


def test_usage_is_live_and_groups_by_what_is_asked(client: httpx.Client, gateway: Gateway) -> None:
    session = new_session(client, user_metadata={"tag": "nightly"})["id"]
    run(client, session, "forward", data=[datum(6)])
    (row,) = usage(client, session_id=session, by=["day", "project", "key", "session", "model", "meter", "tag"])
    assert (row["session_id"], row["base_model"], row["meter"], row["tag"]) == (session, BASE, "train", "nightly")
    assert (row["quantity"], row["cost_nanos"]) == (6, price_of(6, RATES["train"]))
    assert row["start"].endswith("00:00:00Z")
    (total,) = usage(client, session_id=session, by=["session"])
    assert total["cost_nanos"] == row["cost_nanos"]

    text = client.get("/usage", params={"session_id": session, "by": ["meter", "tag"], "format": "csv"})
    assert text.headers["content-type"].startswith("text/csv")
    assert list(csv.reader(io.StringIO(text.text))) == [
        ["meter", "tag", "quantity", "cost_usd"],
        ["train", "nightly", "6", f"0.{row['cost_nanos']:09d}"],
    ]


@pytest.mark.parametrize("by", [["hour", "day"], ["key", "key"], ["colour"]])
def test_groupings_that_make_no_sense_are_refused(client: httpx.Client, by: list[str]) -> None:
    assert client.get("/usage", params={"by": by}).status_code == 400


def test_a_statement_is_the_month_of_the_projects_account(client: httpx.Client) -> None:
    run(client, new_session(client)["id"], "forward", data=[datum(4)])
    day = usage(client, by=["day"])[-1]["start"]
    statement = client.get(f"/statements/{day[:7]}")
    assert statement.status_code == 200
    body = statement.json()
    assert body["closing_nanos"] == body["opening_nanos"] + sum(line["amount_nanos"] for line in body["lines"])
    assert client.get(f"/statements/{day[:7]}", params={"format": "csv"}).text.startswith("kind,base_model,meter")
    for wrong in ("2026-13", "2026", "now", "2026-1"):
        refused = client.get(f"/statements/{wrong}")
        assert (refused.status_code, refused.json()["error"]["field"]) == (400, "month")


def test_an_estimate_is_what_the_loop_then_costs_at_most(client: httpx.Client) -> None:
    plan = {"base_model": BASE, "steps": 3, "batch_size": 2, "datum_tokens": 4}
    plan |= {"prompts": 1, "prompt_tokens": 5, "samples": 2, "sample_tokens": 6}
    estimate = client.post("/estimate", json=plan)
    assert estimate.status_code == 200, estimate.text
    quantities = {line["meter"]: line["quantity"] for line in estimate.json()["lines"]}
    assert quantities == {"prefill": 15, "sample": 36, "train": 24}

    session = trained_session(client)
    before = client.get(f"/sessions/{session}").json()["cost_nanos"]
    for _ in range(3):
        run(client, session, "forward_backward", data=[datum(4), datum(4)])
        body = {"prompt": [97] * 5, "num_samples": 2, "max_tokens": 6}
        assert client.post(f"/sessions/{session}/sample", json=body).status_code == 200
    spent = client.get(f"/sessions/{session}").json()["cost_nanos"] - before
    assert 0 < spent <= estimate.json()["cost_nanos"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"base_model": "unheard-of"}, "base_model"),
        ({"steps": 0}, "steps"),
        ({"prompts": 1, "prompt_tokens": 10**6}, "sample_tokens"),
        ({"colour": 1}, "colour"),
    ],
)
def test_an_estimate_of_nonsense_is_refused(client: httpx.Client, change: dict[str, Any], field: str) -> None:
    refused = client.post("/estimate", json={"base_model": BASE, "batch_size": 1, "datum_tokens": 1, **change})
    assert refused.status_code in (400, 404)
    assert refused.json()["error"]["field"] == field


def test_out_of_budget_is_402_and_queues_nothing(client: httpx.Client, gateway: Gateway, session: str) -> None:
    limit = client.put(f"/budgets/session/{session}", json={"hard_nanos": TOO_SMALL})
    assert limit.status_code == 200, limit.text
    refused = client.post(f"/sessions/{session}/forward_backward", json={"data": [datum()], "seq": 1})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["kind"]) == (402, "insufficient_quota", "out_of_budget")
    assert error["details"]["limit"] == TOO_SMALL
    assert "Retry-After" not in refused.headers
    assert client.get(f"/sessions/{session}/operations").json()["data"] == []

    assert client.delete(f"/budgets/session/{session}").status_code == 204
    assert client.delete(f"/budgets/session/{session}").status_code == 404
    run(client, session, "forward_backward", data=[datum()], seq=1)


def test_openais_client_does_not_repeat_a_request_that_is_out_of_budget(client: httpx.Client, gateway: Gateway) -> None:
    session = trained_session(client)
    client.put(f"/budgets/session/{session}", json={"hard_nanos": 1})
    sent: list[str] = []
    transport = httpx.Client(event_hooks={"request": [lambda request: sent.append(request.url.path)]})
    sdk = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.keys.owner, http_client=transport)
    messages: Any = [{"role": "user", "content": "hello"}]
    for stream in (False, True):
        sent.clear()
        with pytest.raises(openai.RateLimitError) as refused:
            sdk.chat.completions.create(model=session, messages=messages, max_tokens=50, stream=stream)
        assert (refused.value.code, len(sent)) == ("insufficient_quota", 1)
        assert refused.value.response.headers["x-should-retry"] == "false"
    transport.close()


def test_a_soft_limit_warns_and_goes_on(client: httpx.Client, session: str) -> None:
    client.put(f"/budgets/session/{session}", json={"soft_nanos": 1})
    response = client.post(f"/sessions/{session}/forward", json={"data": [datum()]})
    assert response.status_code == 202
    assert response.headers["X-Loopline-Budget-Warning"].startswith(f"session {session}: ")


def test_budgets_are_the_projects_own_and_need_an_admin(client: httpx.Client, gateway: Gateway, key_id: str) -> None:
    session = new_session(client)["id"]
    with gateway.client(gateway.keys.stranger) as stranger, gateway.client(gateway.keys.inference_only) as limited:
        assert stranger.put(f"/budgets/session/{session}", json={"hard_nanos": 1}).status_code == 404
        assert stranger.put(f"/budgets/key/{key_id}", json={"hard_nanos": 1}).status_code == 404
        assert stranger.get("/budgets").json() == {"data": []}
        assert limited.put(f"/budgets/session/{session}", json={"hard_nanos": 1}).status_code == 403
    for body in (
        {},
        {"hard_nanos": -1},
        {"hard_nanos": 1.5},
        {"hard_nanos": 2**62},
        {"period": "week", "hard_nanos": 1},
    ):
        assert client.put(f"/budgets/session/{session}", json=body).status_code == 400
    assert client.put(f"/budgets/galaxy/{session}", json={"hard_nanos": 1}).status_code == 400
