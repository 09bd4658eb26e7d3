"""`make bench-budgets`: callers in several processes race through two gateways for a budget of three requests.

Each race has a key of its own. What the key has spent afterwards must fit into its budget, and at least one caller
must have been served. At the end one gateway is killed in the middle of its work: 60 s later nothing is held any more.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
from sqlalchemy import text

from billing.database import reading
from billing.reconcile import run as reconcile
from tests.bench.killable import Killable, Place, open_calls, scripted_place

PROCESSES = 4
SERVED = 3  # requests that a budget covers
MAX_TOKENS = 6
ORPHANS_S = 60.0
STREAMS, HELD = 16, 8  # streams when a gateway is killed, and how many of them must be held then


async def _fire(order: dict[str, Any]) -> list[int]:
    body = {"model": order["model"], "prompt": "race", "max_tokens": MAX_TOKENS}
    headers = {"Authorization": f"Bearer {order['key']}"}
    async with httpx.AsyncClient(headers=headers, timeout=120) as client:

        async def one(number: int) -> int:
            url = order["urls"][number % len(order["urls"])]
            return (await client.post(f"{url}/v1/completions", json=body)).status_code

        return await asyncio.gather(*(one(number) for number in range(order["callers"])))


def caller() -> None:
    """A process of callers: one order per line in, the statuses out."""
    for line in sys.stdin:
        print(json.dumps(asyncio.run(_fire(json.loads(line)))), flush=True)


class Callers:
    """PROCESSES processes that fire together."""

    def __init__(self) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.bench.budgets", "--caller"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(PROCESSES)
        ]

    def fire(self, urls: list[str], key: str, model: str, callers: int) -> list[int]:
        order = json.dumps({"urls": urls, "key": key, "model": model, "callers": callers // PROCESSES})
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(order + "\n")
            process.stdin.flush()
        statuses: list[int] = []
        for process in self._processes:
            assert process.stdout is not None
            statuses += json.loads(process.stdout.readline())
        return statuses

    def end(self) -> None:
        for process in self._processes:
            with process:  # closes its pipes, which ends it, and waits
                pass


def races(place: Place, gateways: list[Killable], count: int, seed: int) -> int:
    """Run the races; return how many went wrong."""
    keys, dice, wrong = place.new_keys(count + 1), random.Random(seed), 0
    url, urls = place.settings.resolved_database_url, [gateway.url for gateway in gateways]
    admin, callers = keys.pop(), Callers()
    budgets = httpx.Client(base_url=f"{urls[0]}/training/v1", headers={"Authorization": f"Bearer {admin}"}, timeout=60)
    body = {"base_model": place.endpoint.name, "prompts": 1, "prompt_tokens": 4, "sample_tokens": MAX_TOKENS}
    worst = budgets.post("/estimate", json=body).json()["step_cost_nanos"] + 2  # a hold is rounded up
    served: list[int] = []
    try:
        for number, key in enumerate(keys):
            key_id = key.split("-")[1]
            budgets.put(f"/budgets/key/{key_id}", json={"hard_nanos": SERVED * worst}).raise_for_status()
            statuses = callers.fire(urls, key, place.endpoint.name, dice.choice([16, 64]))
            with reading(url) as connection:
                spent = connection.execute(
                    text(
                        "SELECT (SELECT coalesce(sum(nanos), 0) FROM ledger_spend WHERE scope_id = :key)"
                        " + (SELECT coalesce(sum(amount), 0) FROM holds WHERE key_id = :key)"
                    ),
                    {"key": key_id},
                ).scalar_one()
            right = set(statuses) <= {200, 429} and statuses.count(200) >= 1 and spent <= SERVED * worst
            served.append(statuses.count(200))
            if not right:
                wrong += 1
                print(f"  WRONG race {number}: {sorted(set(statuses))}, spent {spent} of {SERVED * worst}")
    finally:
        callers.end()
        budgets.close()
    print(f"  {count} races, {wrong} wrong; served {min(served)} to {max(served)} of a budget for {SERVED}")
    return wrong


def orphans(place: Place, gateways: list[Killable]) -> int:
    """Kill a gateway under load; return how many holds are left 60 s later.

    Raises:
        AssertionError: nothing was held when it was killed, so nothing was shown.
    """
    (key,) = place.new_keys(1)
    body = {"model": place.endpoint.name, "prompt": "long", "max_tokens": 400, "stream": True}
    url, deadline = place.settings.resolved_database_url, time.monotonic() + ORPHANS_S

    def stream(_: int) -> None:
        try:
            headers = {"Authorization": f"Bearer {key}"}
            while True:  # an answer may be short, and the next one is held as well
                with httpx.stream("POST", f"{gateways[1].url}/v1/completions", json=body, headers=headers) as response:
                    response.raise_for_status()
                    for _ in response.iter_lines():
                        pass
        except httpx.HTTPError:
            return

    with ThreadPoolExecutor(max_workers=STREAMS) as pool:
        for number in range(STREAMS):
            pool.submit(stream, number)
        while open_calls(url) < HELD and time.monotonic() < deadline:
            time.sleep(0.01)
        gateways[1].kill()
        held = open_calls(url)
    assert held >= HELD, f"{held} streams were held at the kill, not {HELD}"
    deadline = time.monotonic() + ORPHANS_S
    while True:
        left = open_calls(url)
        if not left or time.monotonic() > deadline:
            waited = ORPHANS_S - (deadline - time.monotonic())
            print(f"  {held} holds at the kill, {left} left {waited:.0f} s later")
            return left
        time.sleep(1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.budgets", description=__doc__)
    parser.add_argument("--races", type=int, default=300)
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-kill", action="store_true", help="leave the last part out: it waits")
    parser.add_argument("--caller", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.caller:
        caller()
        return 0
    with scripted_place(options.database, token_delay_ms=5) as place, ExitStack() as opened:
        gateways = [place.gateway(name) for name in ("one", "two")]
        for gateway in gateways:
            opened.callback(gateway.stop)
            gateway.start()
        print(f"{options.database}: two gateways, {PROCESSES} processes of callers")
        wrong = races(place, gateways, options.races, options.seed)
        left = 0 if options.no_kill else orphans(place, gateways)
        time.sleep(2)
        differences = reconcile(place.settings.resolved_database_url, []).differences
        print(f"  {len(differences)} differences")
    right = not (wrong or left or differences)
    print("passed" if right else "FAILED")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
