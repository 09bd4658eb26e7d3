"""`make bench-ledger`: is every token that an engine counted in the ledger, whatever clients and gateways did?

Random calls (streamed or not, n of 1 and 3, stop strings, refusals, retries with the same key, clients that leave)
while the gateway is killed again and again. At the end the engine's counters must equal the sums of the facts, the
books must reconcile, and each answer must say what its facts say. Then the engine is killed under open streams: each
must be billed for what its client had received. Nothing is rounded, nothing is tolerated.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import text

from billing import engines
from billing.database import reading
from billing.reconcile import run as reconcile
from gateway.engines.launch import launch_scripted, launch_vllm
from tests.bench.engine_deaths import kill_engines
from tests.bench.killable import Killable, Place, open_calls, tokens_of
from tests.engines.fixtures import (
    EngineProcess,
    endpoint_of,
    running_engine,
    scripted_spec,
    tiny_spec,
    vocab_size_of,
)
from tests.stack import EngineEndpoint
from tests.tiny_model import cached_tiny_model

CALLERS = 12
TOKEN_DELAY_MS = 4.0
VLLM_KILLS = 2  # each start takes it most of a minute
SETTLE_S = 90.0  # a dead gateway's holds are released 35 s after its last heartbeat
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "and",
    "then",
    "some",
    "more",
    "of",
    "it",
]


@dataclass(kw_only=True)
class Tally:
    """What the callers saw."""

    outcomes: Counter[str] = field(default_factory=Counter[str])
    answers: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    wrong: list[str] = field(default_factory=list[str])


async def one_call(client: httpx.AsyncClient, dice: random.Random, model: str, tally: Tally) -> None:
    """Do one random call, and note how it ended."""
    chat = dice.random() < 0.4
    words = " ".join(dice.choices(WORDS, k=dice.randint(2, 30)))
    body: dict[str, Any] = {"model": model, "max_tokens": dice.randint(1, 40), "seed": dice.getrandbits(30)}
    body |= {"messages": [{"role": "user", "content": words}]} if chat else {"prompt": words}
    body["n"] = dice.choice([1, 1, 3])
    if dice.random() < 0.3:
        body["stop"] = [dice.choice("aeiou"), "zz"]
    if dice.random() < 0.1:
        body |= dice.choice([{"max_tokens": 10**6}, {"logit_bias": {"9999999": 1}}, {"temperature": 7}])
    path = "/chat/completions" if chat else "/completions"
    leaves = dice.random() < 0.3
    if dice.random() < 0.5:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        await streamed(client, path, body, dice.randint(0, 12) if leaves else None, tally)
    else:
        patience_s = dice.uniform(0.0, 0.15) if leaves else 120.0
        key = f"k-{dice.getrandbits(60)}" if dice.random() < 0.3 else None
        await whole(client, path, body, key, patience_s, tally)


async def streamed(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], leave_after: int | None, tally: Tally
) -> None:
    chunks, usage, name, ended = 0, None, "", False
    async with client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            tally.outcomes[f"stream {response.status_code}"] += 1
            return
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                ended = True
                break
            chunk = json.loads(line[6:])
            if "error" in chunk:
                tally.outcomes["stream error"] += 1
                return
            name, usage = chunk["id"], chunk.get("usage") or usage
            chunks += 1
            if leave_after is not None and chunks > leave_after:
                tally.outcomes["left a stream"] += 1
                return
    tally.outcomes["stream"] += ended
    if ended and usage is not None:
        tally.answers[name] = usage


async def whole(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], key: str | None, patience_s: float, tally: Tally
) -> None:
    headers = {"Idempotency-Key": key} if key else {}
    try:
        response = await client.post(path, json=body, headers=headers, timeout=httpx.Timeout(patience_s, connect=5))
    except httpx.ReadTimeout:
        tally.outcomes["left an answer"] += 1
        return
    tally.outcomes[f"answer {response.status_code}"] += 1
    if response.status_code == 200:
        answer = response.json()
        tally.answers[answer["id"]] = answer["usage"]
        if key:
            again = (await client.post(path, json=body, headers=headers)).json()
            tally.outcomes["repeated"] += 1
            if again != answer:
                tally.wrong.append(f"{answer['id']}: the repeated answer differs")


async def drive(gateway: Killable, key: str, model: str, calls: int, kills: int, seed: int) -> Tally:
    """Make ``calls`` calls with CALLERS at a time, killing the gateway ``kills`` times in between."""
    tally, dice = Tally(), random.Random(seed)
    todo = [dice.getrandbits(64) for _ in range(calls)]
    deadly = set(dice.sample(range(calls // 10, calls), min(kills, calls - calls // 10)))
    done = 0
    up, striking = asyncio.Event(), asyncio.Lock()
    up.set()

    async def caller(client: httpx.AsyncClient) -> None:
        nonlocal done
        while todo:
            number, own = done, random.Random(todo.pop())
            done += 1
            if number in deadly:
                async with striking:  # two may be due while the gateway starts
                    up.clear()
                    gateway.kill()
                    await asyncio.to_thread(gateway.start)
                    up.set()
                tally.outcomes["killed"] += 1
            await up.wait()
            try:
                await one_call(client, own, model, tally)
            except httpx.TransportError:
                tally.outcomes["gateway lost"] += 1

    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=f"{gateway.url}/v1", headers=headers, timeout=120) as client:
        await asyncio.gather(*(caller(client) for _ in range(CALLERS)))
    return tally


def await_quiet(url: str, engine: str) -> engines.Tokens:
    """Wait until the engine is quiet and no call is open; return what its counters say more than the facts."""
    deadline = time.monotonic() + SETTLE_S
    surplus = engines.Tokens(prompt=-1, generation=-1)
    while time.monotonic() < deadline:
        counters = engines.parse_counters(httpx.get(f"{engine}/metrics", timeout=5).text)
        assert counters is not None
        with reading(url) as connection:
            counted = engines.counted(connection, engine, since=counters.started_at)
        said = engines.Tokens(prompt=counters.prompt_tokens, generation=counters.generation_tokens)
        surplus = said - counted
        if counters.unfinished == 0 and not open_calls(url) and surplus.none:
            break
        time.sleep(1)
    return surplus


def check_answers(url: str, tally: Tally) -> None:
    """Compare what each answer said with its facts."""
    for name, usage in tally.answers.items():
        facts = tokens_of(url, name)
        prompt = facts.get("prefill", 0) + facts.get("cached_prefill", 0)
        if (prompt, facts.get("sample", 0)) != (usage["prompt_tokens"], usage["completion_tokens"]):
            tally.wrong.append(f"{name}: said {usage}, recorded {facts}")


def lost_tokens(url: str) -> int:
    """Return how many tokens are put down to gateways that died."""
    with reading(url) as connection:
        return connection.execute(
            text("SELECT coalesce(sum(quantity), 0) FROM usage_facts WHERE source LIKE 'lost-%'")
        ).scalar_one()


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """How much of everything, on one engine."""

    calls: int
    kills: int = 0  # of the gateway, between the calls
    engine_kills: int = 0  # when the calls are done and counted
    seed: int


def bench(engine: EngineProcess, endpoint: EngineEndpoint, amounts: Amounts, data_dir: Path) -> bool:
    """Run against one engine; print what was found, return whether everything was right."""
    place = Place(data_dir=data_dir, endpoint=endpoint)
    place.prepare()
    (key,) = place.new_keys(1)
    gateway = place.gateway("gateway")
    url = place.settings.resolved_database_url
    gateway.start()
    started = time.monotonic()
    calls, kills, seed = amounts.calls, amounts.kills, amounts.seed
    try:
        tally = asyncio.run(drive(gateway, key, endpoint.name, calls, kills, seed))
        seconds = time.monotonic() - started
        surplus = await_quiet(url, endpoint.url)
        print(f"{calls} calls, {kills} kills, seed {seed}, engine {endpoint.name}: {seconds:.0f} s")
        print("  " + ", ".join(f"{name}: {count}" for name, count in sorted(tally.outcomes.items())))
        print(f"  counters minus ledger: {surplus.prompt} prompt, {surplus.generation} generated tokens")
        print(f"  lost with killed gateways, billed to nobody: {lost_tokens(url)} tokens", flush=True)
        cut = asyncio.run(
            kill_engines(engine, gateway, url, key=key, model=endpoint.name, kills=amounts.engine_kills, seed=seed)
        )
        after = await_quiet(url, endpoint.url)
    finally:
        gateway.stop()
    check_answers(url, tally)
    report = reconcile(url, [endpoint.url])
    if amounts.engine_kills:
        print(
            f"  {amounts.engine_kills} kills of the engine cut {cut.streams} streams off: {cut.received} tokens "
            f"received, {cut.billed} billed"
        )
    print(f"  {report.facts} facts, {report.postings} postings, {len(report.differences)} differences")
    wrong = [*tally.wrong, *cut.wrong, *(str(difference) for difference in report.differences)]
    for line in wrong[:20]:
        print(f"  WRONG {line}")
    return surplus.none and after.none and not wrong and report.waiting == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.ledger", description=__doc__)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--real", type=int, help="calls of them on vLLM with the tiny model; default: half")
    parser.add_argument("--kills", type=int, default=10, help="of the gateway, on each engine")
    parser.add_argument("--engine-kills", type=int, default=10, help="of the scripted engine; of vLLM two")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    real = options.calls // 2 if options.real is None else options.real
    right = True
    with ExitStack() as opened, suppress(KeyboardInterrupt):
        directory = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="loopline-ledger-")))
        if options.calls > real:
            spec = scripted_spec()
            amounts = Amounts(
                calls=options.calls - real,
                kills=options.kills,
                engine_kills=options.engine_kills,
                seed=options.seed,
            )
            launch = launch_scripted(spec, token_delay_ms=TOKEN_DELAY_MS)
            with running_engine(launch, spec.url, directory / "scripted.log") as engine:
                right &= bench(engine, endpoint_of(spec, vocab_size=256), amounts, directory / "one")
        if real:
            model = cached_tiny_model()
            spec = tiny_spec(model)
            amounts = Amounts(
                calls=real,
                kills=options.kills,
                engine_kills=min(VLLM_KILLS, options.engine_kills),
                seed=options.seed,
            )
            with running_engine(launch_vllm(spec), spec.url, directory / "vllm.log") as engine:
                right &= bench(engine, endpoint_of(spec, vocab_size=vocab_size_of(model)), amounts, directory / "two")
    print("passed" if right else "FAILED")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
