"""A campaign: so many spoiled requests over every operation of every dialect, and what went wrong."""

import json
import random
import time
import unicodedata
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
from fastapi import FastAPI

from gateway.app import create_app
from gateway.settings import Settings
from tests.fuzz.mutations import spoiled
from tests.tenancy.operations import Operation, keyed
from tests.tenancy.world import World, build
from tests.wire.gateways import Gateway

HANG_S = 10.0
ROUND = 250  # requests on one set of things: some are stopped and deleted on the way
WORKERS = 4
_INSIDES = ("Traceback", "site-packages", "sqlalchemy", "psycopg", "sqlite", "SELECT ", "INSERT ", ".py", "asyncio")


@dataclass(slots=True)
class Outcome:
    """What a campaign met."""

    requests: int = 0
    statuses: Counter[int] = field(default_factory=Counter[int])
    broken: list[str] = field(default_factory=list[str])  # five-hundreds
    leaks: list[str] = field(default_factory=list[str])  # answers that tell of our insides
    hung: list[str] = field(default_factory=list[str])
    operations: set[str] = field(default_factory=set[str])  # what was asked
    slowest_s: float = 0.0


def app_of_all(directory: Path) -> FastAPI:
    """Return the gateway's application, to look at; it serves no model."""
    catalog = directory / "catalog.toml"
    catalog.write_text("")
    return create_app(Settings(data_dir=directory, catalog=catalog))


def run(gateway: Gateway, every: list[Operation], *, count: int, seed: int) -> Outcome:
    """Send ``count`` requests to ``gateway``; the same seed makes the same ones, but for ids."""
    outcome = Outcome()
    kept = [one for one in every if not one.ends]
    for start in range(0, count, ROUND):
        world = build(gateway, gateway.keys.owner, f"fuzz-{seed}-{start}")
        numbers = range(start, min(count, start + ROUND))
        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(partial(_one, gateway, every, kept, world, seed, outcome), numbers))
    return outcome


def log_faults(gateway: Gateway) -> list[str]:
    """Return the log lines that are no single JSON object, hold control characters, or hold a key's secret."""
    secrets = [key.split("-")[2] for key in (gateway.keys.owner, gateway.keys.stranger)]
    faults: list[str] = []
    for line in gateway.log.read_text().splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            faults.append(line)
            continue
        texts = [text for text in event.values() if isinstance(text, str)]
        if any(unicodedata.category(mark) == "Cc" for text in texts for mark in text):
            faults.append(line)
        if any(secret in line for secret in secrets):
            faults.append(line)
    return faults


def _one(
    gateway: Gateway,
    every: list[Operation],
    kept: list[Operation],
    world: World,
    seed: int,
    outcome: Outcome,
    number: int,
) -> None:
    chance = random.Random(f"{seed}/{number}")
    operation = chance.choice(kept if chance.random() < 0.95 else every)
    request = keyed(operation, spoiled(chance, operation.draft(gateway.url, world)), gateway.keys.owner)
    with httpx.Client(timeout=HANG_S, trust_env=False) as client:
        send(gateway, client, operation, request, f"seed={seed} number={number}", outcome)


def send(
    gateway: Gateway, client: httpx.Client, operation: Operation, request: httpx.Request, which: str, outcome: Outcome
) -> None:
    """Send a request about ``operation`` and note what came of it."""
    said = f"{operation.name} {which} {request.url.raw_path[:200]!r} {request.content[:400]!r}"
    began = time.monotonic()
    outcome.operations.add(operation.name)
    try:
        response = client.send(request)
        status, text = response.status_code, response.text[:2000]
    except httpx.TimeoutException:
        outcome.hung.append(said)
        return
    except (httpx.RemoteProtocolError, httpx.WriteError, httpx.ReadError, httpx.LocalProtocolError, httpx.InvalidURL):
        status, text = 0, ""  # refused by the server's parser or our own, or closed while a too large body was sent
    outcome.requests += 1
    outcome.statuses[status] += 1
    outcome.slowest_s = max(outcome.slowest_s, time.monotonic() - began)
    if any(word in text for word in (*_INSIDES, str(gateway.settings.data_dir))):
        outcome.leaks.append(f"{said} -> {text}")
    if status >= 500:
        outcome.broken.append(f"{status} {said} -> {text}")
