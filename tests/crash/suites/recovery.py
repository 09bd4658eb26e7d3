"""``make recovery``: how long a session that has run for long takes to come back after its trainer was killed."""

import asyncio
import os
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from tests.crash.oracles.sql import connected, rows
from tests.crash.processes import Setting, Stack, running
from tests.crash.report import Verdict
from tests.crash.suites.common import Options
from tests.tiny_model import FULL_VOCABULARY, cached_tiny_model, smollm_directory

BARS_S = {"tiny": 5.0, "smollm2": 60.0}  # from the start of the process
MOST_REPLAY_S = 20.0  # the default of LOOPLINE_SNAPSHOT_AFTER_S: an hour leaves no more than this to repeat
_BATCH = {"tiny": (8, 64), "smollm2": (4, 64)}  # datums, tokens each
_LEASE_S = 2.0
SNAPSHOTS, NEARLY = 2, 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a rebuild would repeat, and the snapshots seen so far."""

    snapshots: int = 0
    snapshot_seq: int = 0
    operations: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A recovery. ``ready_s`` and ``going_on_s`` count from the start of the new process.

    ``computing_s`` is the processor time of that process until the session went on: on a machine that has nothing else
    to do, it is the most that the recovery can take (but for waiting for the disk).
    """

    operations: int
    replay: Replay
    interval_s: float
    ready_s: float
    going_on_s: float
    computing_s: float


def recovery(model: str, options: Options, console: Console) -> Verdict:
    """Train until a third snapshot is nearly due, kill, start, measure: there is never more to rebuild."""
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
        measured = asyncio.run(_measure(setting, *_BATCH[model]))
    bar_s = BARS_S[model]
    verdict.line("operations before the kill", measured.operations)
    verdict.line("snapshots until then", measured.replay.snapshots)
    verdict.line("operations to repeat", measured.replay.operations)
    verdict.line("computing time to repeat", f"{measured.replay.seconds:.1f} s", f"{MOST_REPLAY_S:g} s")
    verdict.line(
        "computing time between the last two snapshots", f"{measured.interval_s:.1f} s", f"{MOST_REPLAY_S:g} s"
    )
    verdict.line("start of the process until it has its base model", f"{measured.ready_s:.1f} s")
    verdict.line("until the session goes on", f"{measured.going_on_s:.1f} s", f"{bar_s:g} s")
    rebuilding_s = measured.going_on_s - measured.ready_s
    verdict.line("of that, rebuilding", f"{rebuilding_s:.1f} s")
    verdict.line("processor time of the process until then", f"{measured.computing_s:.1f} s")
    verdict.require(measured.going_on_s <= bar_s, f"recovery took {measured.going_on_s:.1f} s")
    return verdict


async def _measure(setting: Setting, datums: int, length: int) -> Measured:
    async with running(setting) as stack:
        headers = {"Authorization": f"Bearer {stack.key}"}
        async with httpx.AsyncClient(
            base_url=f"{stack.url}/training/v1", headers=headers, timeout=120.0, trust_env=False
        ) as client:
            opened = await client.post("/sessions", json={"base_model": setting.name, "lora": {"rank": 8}})
            session = opened.json()["id"]
            rng = random.Random(1)
            operations, interval_s, before = 0, 0.0, Replay()
            while before.snapshots < SNAPSHOTS or before.seconds < NEARLY * interval_s:
                await _run(client, session, "forward_backward", {"data": _batch(rng, datums, length)})
                await _run(client, session, "optim_step", {})
                operations += 2
                replay = _replay(stack, session, before)
                if replay.snapshots > before.snapshots:
                    interval_s = before.seconds
                before = replay
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
            computing_s = _processor_s(stack.members["trainer-0"].pid)
            return Measured(
                operations=operations,
                replay=before,
                interval_s=interval_s,
                ready_s=ready_s,
                going_on_s=going_on_s,
                computing_s=computing_s,
            )


def _processor_s(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _starts(stack: Stack) -> int:
    """How often the trainer got ready."""
    return stack.log("trainer-0").read_text(errors="replace").count('"trainer_ready"')


def _replay(stack: Stack, session: str, before: Replay) -> Replay:
    """What a rebuild would have to repeat now."""
    with connected(stack.database_url) as connection:
        seq = rows(connection, "SELECT snapshot_seq FROM sessions WHERE id = :id", id=session)[0]["snapshot_seq"] or 0
        later = rows(
            connection,
            "SELECT started_at, finished_at FROM operations WHERE session_id = :id AND seq > :seq",
            id=session,
            seq=seq,
        )
    return Replay(
        snapshots=before.snapshots + (seq != before.snapshot_seq),
        snapshot_seq=seq,
        operations=len(later),
        seconds=sum(row["finished_at"] - row["started_at"] for row in later) / 1e6,
    )


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
