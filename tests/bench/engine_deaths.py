"""Engines that die under open streams: what is billed then is what the clients were sent.

An engine takes its counters along. Chunks that it had sent are billed; the one that it was making is lost, and nobody
pays for it.
"""

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.bench.killable import Killable, open_calls, tokens_of
from tests.engines.fixtures import EngineProcess, until

STREAMS = 8  # open at once when the engine dies
CHUNKS = 3  # that each of them has received by then, or it ended


@dataclass(kw_only=True)
class Cut:
    """Of all streams that an engine's death cut off."""

    streams: int = 0
    received: int = 0  # tokens in chunks
    billed: int = 0
    wrong: list[str] = field(default_factory=list[str])


async def kill_engines(
    engine: EngineProcess, gateway: Killable, url: str, *, key: str, model: str, kills: int, seed: int
) -> Cut:
    """Kill ``engine`` ``kills`` times while STREAMS streams are open, and hold their bills against what they received.

    ``url`` is the database's.
    """
    dice, cut = random.Random(seed), Cut()
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=f"{gateway.url}/v1", headers=headers, timeout=120) as client:
        for _ in range(kills):
            begun = asyncio.Semaphore(0)
            streams = [asyncio.create_task(_stream(client, _body(dice, model), begun)) for _ in range(STREAMS)]
            for _ in streams:
                await begun.acquire()
            await asyncio.to_thread(engine.kill)
            ends = [end for end in await asyncio.gather(*streams) if end is not None]
            await until(lambda: asyncio.to_thread(lambda: open_calls(url) == 0), timeout_s=60)
            for name, received in ends:
                billed = tokens_of(url, name).get("sample", 0)
                cut.streams, cut.received, cut.billed = cut.streams + 1, cut.received + received, cut.billed + billed
                if billed != received:
                    cut.wrong.append(f"{name}: received {received} tokens before its engine died, billed {billed}")
            await asyncio.to_thread(engine.start)
    return cut


def _body(dice: random.Random, model: str) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": "once upon a time",
        "max_tokens": 400,
        "n": dice.choice([1, 3]),
        "seed": dice.getrandbits(30),
        "stream": True,
        "return_token_ids": True,
    }


async def _stream(client: httpx.AsyncClient, body: dict[str, Any], begun: asyncio.Semaphore) -> tuple[str, int] | None:
    """Return the answer's id and the tokens received, None where the stream came to its end."""
    name, tokens, chunks = "", 0, 0
    try:
        async with client.stream("POST", "/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    return name, tokens
                name, chunks = chunk["id"], chunks + 1
                tokens += sum(len(choice.get("token_ids") or ()) for choice in chunk["choices"])
                if chunks == CHUNKS:
                    begun.release()
    finally:
        if chunks < CHUNKS:
            begun.release()
    return None
