"""What ``/metrics`` says, and that no stranger's path and no tenant's id becomes a label."""

import re
import time

import httpx

from tests.wire.gateways import Gateway
from tests.wire.training import BASE, run

NAMED = (
    "loopline_requests_total",
    "loopline_request_seconds_count",
    "loopline_tokens_total",
    "loopline_queued_operations",
    "loopline_queue_oldest_seconds",
    "loopline_operation_seconds_count",
    "loopline_operation_wait_seconds_count",
    "loopline_gate_seconds_count",
    "loopline_gate_max_difference_nats",
    "loopline_recovering_sessions",
    "loopline_live_sessions",
    "loopline_engine_slots",
    "loopline_engine_calls",
    "loopline_database_up",
    "loopline_tasks",
)


def scraped(gateway: Gateway) -> str:
    return httpx.get(f"{gateway.url}/metrics").text


def test_the_metrics_an_operator_needs_are_there_and_stay_bounded(
    gateway: Gateway, client: httpx.Client, published: str
) -> None:
    scraped(gateway)
    run(
        client,
        published,
        "forward",
        data=[{"model_input": [97], "loss_fn_inputs": {"target_tokens": [98], "weights": [1.0]}}],
    )
    for path in ("/no-such-path", "/v1/../etc", f"/training/v1/sessions/{published}"):
        httpx.get(f"{gateway.url}{path}")
    deadline = time.monotonic() + 20
    while not re.search(r'loopline_operation_seconds_count.*kind="forward"', text := scraped(gateway)) or not re.search(
        r'loopline_tokens_total.*meter="train"', text
    ):
        assert time.monotonic() < deadline, text
    present = set(re.findall(r"^(loopline_[a-z_]+)", text, re.MULTILINE))
    waiting = {"loopline_queued_operations", "loopline_queue_oldest_seconds"}  # series only while something waits
    assert not [name for name in NAMED if name not in present | waiting]
    labels = set(re.findall(r'(?:dialect|base_model|kind|status|meter|what|occasion|verdict)="([^"]*)"', text))
    assert {"/training/v1", "other", BASE} <= labels
    assert not [label for label in labels if re.match(r"sess-|op-|proj-|ver-|/no|/etc", label)]
