"""``make recovery``: how long a session that has run for long takes to come back after its trainer was killed."""

import asyncio
import random
import time
from dataclasses import replace
from typing import Any

import httpx
from rich.console import Console

from tests.crash.oracles.sql import connected, rows
from tests.crash.processes import Setting, Stack, running
from tests.crash.report import Verdict
from tests.crash.suites.common import Options
from tests.tiny_model import FULL_VOCABULARY, cached_tiny_model, smollm_directory

BARS_S = {"tiny": 5.0, "smollm2": 60.0}  # from ready, where imports are not what is measured; from the start
MOST_REPLAY_S = 20.0  # the default of LOOPLINE_SNAPSHOT_AFTER_S: an hour leaves no more than this to repeat
_BATCH = {"tiny": (32, 256), "smollm2": (4, 64)}
_LEASE_S = 2.0


def recovery(model: str, options: Options, console: Console) -> Verdict:
    """Train until a snapshot was taken and as much as possible was done since, kill, start, measure."""
    command = f"make recovery MODEL={model} DB={options.database}"
    verdict = Verdict(title=f"recovery of a long session, {model}, {options.database}", command=command)
    path = cached_tiny_model() if model == "tiny" else smollm_directory()
    setting = replace(
        options.setting("recovery", options.seed),
        model=path,
        vocab_size=FULL_VOCABULARY,
        dtype="float32" if model == "tiny" else "bfloat16",
        environment={"LOOPLINE_THREADS": "0", "LOOPLINE_SNAPSHOT_AFTER_S": str(MOST_REPLAY_S)},
    )
    with console.status("training until a recovery would take longest"):
        facts = asyncio.run(_measure(setting, *_BATCH[model]))
    verdict.line("operations before the kill", facts["operations"])
    verdict.line("of them after the last snapshot", facts["replayed"])
    verdict.line("computing time since that snapshot", f"{facts['since_snapshot_s']:.1f} s", f"{MOST_REPLAY_S:g} s")
    bar_s = BARS_S[model]
    judged_s = facts["going_on_s"] - (facts["ready_s"] if model == "tiny" else 0.0)
    verdict.line("start of the process until it has its base model", f"{facts['ready_s']:.1f} s")
    verdict.line("until the session goes on", f"{facts['going_on_s']:.1f} s", "60 s" if model == "smollm2" else "")
    verdict.line(
        "of that, rebuilding", f"{facts['going_on_s'] - facts['ready_s']:.1f} s", "5 s" if model == "tiny" else ""
    )
    verdict.require(judged_s <= bar_s, f"recovery took {judged_s:.1f} s")
    return verdict


async def _measure(setting: Setting, datums: int, length: int) -> dict[str, Any]:
    async with running(setting) as stack:
        headers = {"Authorization": f"Bearer {stack.key}"}
        async with httpx.AsyncClient(
            base_url=f"{stack.url}/training/v1", headers=headers, timeout=120.0, trust_env=False
        ) as client:
            opened = await client.post("/sessions", json={"base_model": setting.name, "lora": {"rank": 8}})
            session = opened.json()["id"]
            rng = random.Random(1)
            operations = 0
            while True:
                await _run(client, session, "forward_backward", {"data": _batch(rng, datums, length)})
                await _run(client, session, "optim_step", {})
                operations += 2
                facts = _since_snapshot(stack, session)
                if facts["snapshots"] and facts["since_snapshot_s"] > 0.85 * MOST_REPLAY_S:
                    break
            stack.members["trainer-0"].wanted = False
            stack.kill("trainer-0")
            await asyncio.sleep(_LEASE_S)
            submitted = await client.post(f"/sessions/{session}/optim_step", json={})
            assert submitted.status_code == 202, submitted.text
            started, starts = time.monotonic(), _starts(stack)
            stack.members["trainer-0"].wanted = True
            while _starts(stack) == starts:
                await asyncio.sleep(0.01)
            ready_s = time.monotonic() - started
            while (await _status(client, submitted.json()["id"])) in ("queued", "running"):
                pass
            going_on_s = time.monotonic() - started
            return {**facts, "operations": operations, "ready_s": ready_s, "going_on_s": going_on_s}


def _starts(stack: Stack) -> int:
    """How often the trainer got ready."""
    return stack.log("trainer-0").read_text(errors="replace").count('"trainer_ready"')


def _since_snapshot(stack: Stack, session: str) -> dict[str, Any]:
    """What a replay would have to repeat now."""
    with connected(stack.database_url) as connection:
        snapshot = rows(connection, "SELECT snapshot_seq FROM sessions WHERE id = :id", id=session)[0]["snapshot_seq"]
        later = rows(
            connection,
            "SELECT started_at, finished_at FROM operations WHERE session_id = :id AND seq > :seq",
            id=session,
            seq=snapshot or 0,
        )
    micros = sum(row["finished_at"] - row["started_at"] for row in later)
    return {"snapshots": snapshot is not None, "replayed": len(later), "since_snapshot_s": micros / 1e6}


async def _run(client: httpx.AsyncClient, session: str, verb: str, body: dict[str, Any]) -> None:
    submitted = await client.post(f"/sessions/{session}/{verb}", json=body)
    assert submitted.status_code == 202, submitted.text
    while (status := await _status(client, submitted.json()["id"])) in ("queued", "running"):
        pass
    assert status == "completed", status


async def _status(client: httpx.AsyncClient, operation: str) -> str:
    return (await client.get(f"/operations/{operation}", params={"wait": 30})).json()["status"]


def _batch(rng: random.Random, datums: int, length: int) -> list[dict[str, Any]]:
    sequences = [[rng.randrange(1000, 40000) for _ in range(length + 1)] for _ in range(datums)]
    return [
        {
            "model_input": tokens[:-1],
            "loss_fn_inputs": {"target_tokens": tokens[1:], "weights": [1.0] * length},
        }
        for tokens in sequences
    ]
