"""`make bench-waiters`: how much 2,000 clients that wait for their operations slow a submit.

No trainer runs, so that nothing becomes final and nobody stops waiting. Submits are timed one after the other and
eight at a time, with nobody waiting and with everybody, in turn.
"""

import argparse
import asyncio
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx

from tests.bench.killable import Killable, Place, scripted_place

BAR = 2.0
ROUNDS = 5
SUBMITS = 160  # timed in a round, each way
SESSIONS = 32
TOGETHER = (1, 8)
WAIT_S = 60  # the longest a poll may take; a round is over before


def client_of(url: str, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=f"{url}/training/v1",
        headers={"Authorization": f"Bearer {key}"},
        timeout=WAIT_S + 30,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,
    )


async def _wait_for_all(url: str, key: str) -> None:
    """A process of waiters: operation ids in, one line out when every poll is with the gateway; ends when killed."""
    ids = sys.stdin.readline().split()
    sent, all_sent = itertools.count(1), asyncio.Event()

    async def note(_: httpx.Request) -> None:
        if next(sent) == len(ids):
            all_sent.set()

    async with client_of(url, key) as client:
        client.event_hooks = {"request": [note]}
        polls = [asyncio.create_task(client.get(f"/operations/{id}", params={"wait": WAIT_S})) for id in ids]
        await all_sent.wait()
        (await client.get("/usage")).raise_for_status()  # behind them all
        print("waiting", flush=True)
        await asyncio.gather(*polls)


@contextmanager
def waiting(url: str, key: str, ids: list[str]) -> Iterator[None]:
    """Have every operation of ``ids`` waited for, by a client of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.waiters", "--waiter", url],
        env={**os.environ, "LOOPLINE_API_KEY": key},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(" ".join(ids) + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == "waiting\n"
        try:
            yield
        finally:
            process.kill()


async def submit(url: str, key: str, sessions: list[str], count: int, together: int) -> tuple[list[str], list[float]]:
    """Submit ``count`` steps, ``together`` at a time; return their operations' ids and the seconds each took."""
    ids: list[str] = []
    seconds: list[float] = []
    numbers = itertools.count()

    async with client_of(url, key) as client:

        async def one_after_the_other() -> None:
            while (number := next(numbers)) < count:
                started = time.perf_counter()
                answer = await client.post(f"/sessions/{sessions[number % len(sessions)]}/optim_step", json={})
                seconds.append(time.perf_counter() - started)
                assert answer.status_code == 202, answer.text
                ids.append(answer.json()["id"])

        await asyncio.gather(*(one_after_the_other() for _ in range(together)))
    return ids, seconds


def measure(place: Place, gateway: Killable, waiters: int) -> bool:
    """Print the table and the ratios; return whether they hold."""
    (key,) = place.new_keys(1)
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=f"{gateway.url}/training/v1", headers=headers, timeout=60) as client:
        body = {"base_model": place.endpoint.name}
        sessions = [client.post("/sessions", json=body).raise_for_status().json()["id"] for _ in range(SESSIONS)]
    ids, _ = asyncio.run(submit(gateway.url, key, sessions, waiters, 16))

    def timed(together: int) -> float:
        _, seconds = asyncio.run(submit(gateway.url, key, sessions, SUBMITS, together))
        return statistics.median(seconds)

    quiet: dict[int, list[float]] = {together: [] for together in TOGETHER}
    waited: dict[int, list[float]] = {together: [] for together in TOGETHER}
    for _ in range(ROUNDS):
        for together in TOGETHER:
            quiet[together].append(timed(together))
        with waiting(gateway.url, key, ids):
            for together in TOGETHER:
                waited[together].append(timed(together))
    holds = True
    for together in TOGETHER:
        ratio = statistics.median(b / a for a, b in zip(quiet[together], waited[together], strict=True))
        holds = holds and ratio <= BAR
        for name, values in (("nobody waits", quiet[together]), (f"{waiters} wait", waited[together])):
            low, middle, high = (f"{1e3 * f(values):.1f}" for f in (min, statistics.median, max))
            print(f"  {together} at a time, {name:12} p50 {middle} ms ({low} to {high})")
        print(f"RATIO waiters{together} {ratio:.2f} (at most {BAR:g})")
    return holds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.waiters", description=__doc__)
    parser.add_argument("--waiters", type=int, default=2000)
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite")
    parser.add_argument("--waiter", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.waiter:
        asyncio.run(_wait_for_all(options.waiter, os.environ["LOOPLINE_API_KEY"]))
        return 0
    with scripted_place(options.database) as place, ExitStack() as opened:
        gateway = place.gateway("gateway")
        opened.callback(gateway.stop)
        gateway.start()
        print(f"{options.database}: {options.waiters} waiters, {SUBMITS} submits in each of {ROUNDS} rounds")
        return 0 if measure(place, gateway, options.waiters) else 1


if __name__ == "__main__":
    sys.exit(main())
