"""Whole calls that are open while their engine dies: each is told, none is billed, all can be repeated."""

import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import make_url

from gateway.engines.launch import launch_scripted
from tests.engines.fixtures import EngineProcess, endpoint_of, running_engine, scripted_spec
from tests.wire.gateways import Gateway, running_gateway
from tests.wire.training import trained_session, usage_of

WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "native": ("/training/v1/sessions/{session}/sample", {"prompt": [97, 98, 99]}),
    "native, of a version": ("/training/v1/sample", {"version": "{session}@1", "prompt": [97, 98, 99]}),
    "completions": ("/v1/completions", {"model": "{session}", "prompt": "abc"}),
    "chat": ("/v1/chat/completions", {"model": "{session}", "messages": [{"role": "user", "content": "abc"}]}),
}


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[Gateway, EngineProcess]]:
    """A gateway in front of an engine that would spend 15 s on a call of these tests."""
    spec = scripted_spec()
    with (
        running_engine(launch_scripted(spec, token_delay_ms=50), spec.url, tmp_path / "engine.log") as engine,
        running_gateway(endpoint_of(spec, vocab_size=256), tmp_path / "data", trainer=True) as gateway,
    ):
        yield gateway, engine


def post(gateway: Gateway, session: str, name: str, max_tokens: int) -> httpx.Response:
    path, body = WHOLE[name]
    named = {key: value.format(session=session) if isinstance(value, str) else value for key, value in body.items()}
    return httpx.post(
        gateway.url + path.format(session=session),
        json={**named, "max_tokens": max_tokens, "seed": 1, "ignore_eos": True},
        headers={"Authorization": f"Bearer {gateway.keys.owner}", "Idempotency-Key": f"{name} {max_tokens}"},
        timeout=60,
    )


def wait_until_all_compute(engine: EngineProcess) -> None:
    deadline = time.monotonic() + 20
    while f"vllm:num_requests_running {len(WHOLE)}" not in httpx.get(f"{engine.url}/metrics").text:
        assert time.monotonic() < deadline


def open_holds(gateway: Gateway) -> int:
    path = make_url(gateway.settings.resolved_database_url).database
    with closing(sqlite3.connect(str(path))) as connection:
        (found,) = connection.execute("SELECT count(*) FROM holds WHERE source LIKE 'smp-%'").fetchone()
    return int(found)


def test_whole_calls_of_an_engine_that_dies_are_told_so_cost_nothing_and_can_be_repeated(
    slow: tuple[Gateway, EngineProcess],
) -> None:
    gateway, engine = slow
    with gateway.client() as client, ThreadPoolExecutor(len(WHOLE)) as pool:
        session = trained_session(client)
        before = usage_of(client, session)
        calls = {name: pool.submit(post, gateway, session, name, 300) for name in WHOLE}
        wait_until_all_compute(engine)
        held = open_holds(gateway)
        engine.kill()
        for name, call in calls.items():
            told = call.result()
            assert (told.status_code, told.json()["error"]["code"]) == (503, "engine_lost"), name
        assert (held, open_holds(gateway)) == (len(WHOLE), 0)
        assert usage_of(client, session) == before
        engine.start()
        for name in WHOLE:
            assert post(gateway, session, name, 2).status_code == 200, name
