"""A gateway that is told to stop does not make anybody wait: long polls are answered as they stand."""

import signal
import threading
import time
from pathlib import Path

import httpx

from tests.stack import EngineEndpoint
from tests.wire.gateways import running_gateway
from tests.wire.training import datum, new_session, submit


def test_a_stopping_gateway_answers_its_waiters_at_once(scripted_engine: EngineEndpoint, tmp_path: Path) -> None:
    with running_gateway(scripted_engine, tmp_path / "data", trainer=False) as gateway, gateway.client() as client:
        session = new_session(client)["id"]
        operation = submit(client, session, "forward", data=[datum()])["id"]
        answers: list[httpx.Response] = []

        def poll() -> None:
            with gateway.client() as waiting:
                answers.append(waiting.get(f"/operations/{operation}", params={"wait": 60}))

        waiters = [threading.Thread(target=poll) for _ in range(20)]
        for waiter in waiters:
            waiter.start()
        while "loopline_waiting_requests 20.0" not in httpx.get(f"{gateway.url}/metrics").text:
            assert gateway.process.poll() is None
        gateway.process.send_signal(signal.SIGTERM)
        told = time.monotonic()
        for waiter in waiters:
            waiter.join()
        assert gateway.process.wait(timeout=20) == 0
        took = time.monotonic() - told
    assert [(answer.status_code, answer.json()["status"]) for answer in answers] == [(200, "queued")] * 20
    assert took < 5, "the grace is 10 s"
