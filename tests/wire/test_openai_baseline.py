"""Clients that come and go leave nothing behind: no task, no socket, no held connection, no call at an engine, no hold.

``LOOPLINE_LEAVERS=500`` for the full amount (``make leavers``); the suite takes fewer.
"""

import asyncio
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from billing.database import reading
from gateway.engines.launch import launch_scripted
from gateway.store.sqlite import READERS
from tests.engines.fixtures import EngineProcess, endpoint_of, running_engine, scripted_spec
from tests.wire.gateways import Gateway, running_gateway
from tests.wire.training import BASE

COUNT = int(os.environ.get("LOOPLINE_LEAVERS", "40"))
AT_ONCE = 20
POOL_FILES = 2 * READERS  # the database's connections are opened when they are first needed, and kept
SETTLE_S = 60.0  # idle connections to the engine are dropped after 4 s; a machine under load takes its time


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, EngineProcess]]:
    """A gateway in front of an engine that spends 20 ms on a token."""
    folder = tmp_path_factory.mktemp("steady")
    spec = scripted_spec()
    with (
        running_engine(launch_scripted(spec, token_delay_ms=20), spec.url, folder / "engine.log") as engine,
        running_gateway(endpoint_of(spec, vocab_size=256), folder / "data", trainer=False) as gateway,
    ):
        yield gateway, engine


async def leave(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    """Leave a stream at its first frame, an answer of one piece while it is being computed."""
    if body["stream"]:
        async with client.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    return
    with pytest.raises(httpx.ReadTimeout):
        await client.post(path, json=body, timeout=httpx.Timeout(60, read=0.1))


async def many(gateway: Gateway, count: int, *, stream: bool) -> None:
    turns = asyncio.Semaphore(AT_ONCE)
    headers = {"Authorization": f"Bearer {gateway.keys.owner}"}
    chat = {"model": BASE, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 400, "ignore_eos": True}
    plain = {"model": BASE, "prompt": "Hi", "max_tokens": 400, "n": 2, "ignore_eos": True}

    async def one(client: httpx.AsyncClient, number: int) -> None:
        path, body = (("/chat/completions", chat), ("/completions", plain))[number % 2]
        async with turns:
            await leave(client, path, {**body, "stream": stream, "seed": number})

    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=f"{gateway.url}/v1", headers=headers, timeout=60, limits=limits) as client:
        await asyncio.gather(*(one(client, number) for number in range(count)))


def standing(gateway: Gateway) -> tuple[int, int, int, int]:
    """Return the gateway's tasks, its open files, its calls at engines, and the holds of calls that run."""
    said = httpx.get(f"{gateway.url}/metrics").text
    tasks = re.search(r"^loopline_tasks (\S+)$", said, re.MULTILINE)
    assert tasks is not None
    calls = sum(float(count) for count in re.findall(r"^loopline_engine_calls\{.*\} (\S+)$", said, re.MULTILINE))
    with reading(gateway.settings.resolved_database_url) as connection:
        running = connection.execute(text("SELECT count(*) FROM holds WHERE owner IS NOT NULL")).scalar_one()
    return int(float(tasks[1])), len(list(Path(f"/proc/{gateway.process.pid}/fd").iterdir())), int(calls), running


@pytest.mark.parametrize("stream", [True, False], ids=["streams", "calls"])
def test_clients_that_leave_bring_everything_back_to_the_baseline(
    steady: tuple[Gateway, EngineProcess], stream: bool
) -> None:
    gateway, engine = steady
    asyncio.run(many(gateway, AT_ONCE, stream=stream))  # what is opened once and kept, is open now
    before = settled(gateway, None)

    asyncio.run(many(gateway, COUNT, stream=stream))

    tasks, files, *none = before
    settled(gateway, (tasks, files + POOL_FILES, *none))
    assert "vllm:num_requests_running 0\n" in httpx.get(f"{engine.url}/metrics").text


def settled(gateway: Gateway, most: tuple[int, ...] | None) -> tuple[int, ...]:
    """Wait until nothing runs and nothing more is open than ``most``, or than a moment ago; return what is."""
    deadline = time.monotonic() + SETTLE_S
    last = standing(gateway)
    while True:
        time.sleep(0.3)
        now = standing(gateway)
        quiet = not any(now[2:])
        if quiet and (now[:2] == last[:2] if most is None else all(a <= b for a, b in zip(now, most, strict=True))):
            return now
        assert time.monotonic() < deadline, (now, most)
        last = now
