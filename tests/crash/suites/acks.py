"""``make acks``: an acknowledgement leaves only after everything it needs was synced. strace is the witness."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from tests.crash.launchers import Launcher
from tests.crash.oracles.sql import connected, rows
from tests.crash.processes import Stack, running
from tests.crash.report import Verdict
from tests.crash.straced import Call, Needs, parse, unsupported
from tests.crash.suites.common import Options

AT_ONCE = 8
BIG_EVERY = 10
_BIG_DATUMS, _BIG_LENGTH = 24, 700  # about 400 KiB stored: a file of its own


def acks(count: int, options: Options, console: Console) -> Verdict:
    """Follow ``count`` acknowledgements, every tenth of a body that is stored in a file."""
    command = f"make acks N={count} SEED={options.seed} DB={options.database}"
    verdict = Verdict(title=f"fsync before {count} acknowledgements on {options.database}", command=command)
    with options.launching(console) as launcher, console.status(f"following {count} acknowledgements"):
        calls, needs = asyncio.run(_follow(count, options, launcher))
    log = "pg_wal/" if options.database == "postgres" else "loopline.db-wal"
    for one in needs:
        verdict.violations += unsupported(calls, one, log=log)
    syncs = sum(call.name in ("fsync", "fdatasync") and log in call.path for call in calls)
    verdict.require(len(needs) == count, f"{len(needs)} operations were acknowledged")
    verdict.line("acknowledgements", len(needs), str(count))
    verdict.line("of them with a body file", sum(one.body_file is not None for one in needs))
    verdict.line("syncs of the database's log", syncs)
    verdict.line("acknowledged before everything was on disk", len(verdict.violations), "0")
    return verdict


async def _follow(count: int, options: Options, launcher: Launcher | None) -> tuple[Sequence[Call], Sequence[Needs]]:
    setting = options.setting("acks", options.seed, traced=True, trainers=0)  # a trainer writes to the same log
    async with running(setting, launcher) as stack:
        ids = await _submit(stack, count, random.Random(options.seed))
        with connected(stack.database_url) as connection:
            found = {row["id"]: row for row in rows(connection, _BODIES)}
        stack.terminate("gateway")
        traces = [stack.directory / "gateway.strace"]
        if stack.postgres_dir is not None:
            traces.append(stack.postgres_dir / "postgres.strace")
        calls = [call for trace in traces for call in parse(trace.read_text(errors="replace").splitlines())]
        blobs = stack.data_dir / "blobs"
        return sorted(calls, key=lambda call: call.ended), [_needs(id, found[id], blobs) for id in ids]


_BODIES = (
    "SELECT o.id, o.project_id, b.digest, b.content IS NULL AS in_file FROM operations o"
    " JOIN blobs b ON b.project_id = o.project_id AND b.digest = o.payload_digest"
)


def _needs(id: str, row: Any, blobs: Path) -> Needs:
    file = blobs / row["project_id"] / row["digest"][:2] / row["digest"]
    return Needs(operation_id=id, body_file=str(file) if row["in_file"] else None)


async def _submit(stack: Stack, count: int, rng: random.Random) -> list[str]:
    """Submit operations, several at once; return the ids that were acknowledged."""
    headers = {"Authorization": f"Bearer {stack.key}"}
    async with httpx.AsyncClient(
        base_url=f"{stack.url}/training/v1", headers=headers, timeout=60.0, trust_env=False
    ) as client:
        opened = await client.post("/sessions", json={"base_model": stack.setting.name, "lora": {"rank": 4}})
        assert opened.status_code == 201, opened.text
        session, slots = opened.json()["id"], asyncio.Semaphore(AT_ONCE)

        async def submit(seq: int) -> str:
            big = seq % BIG_EVERY == 0
            data = _data(rng, stack.setting.vocab_size, *((_BIG_DATUMS, _BIG_LENGTH) if big else (1, 8)))
            async with slots:
                response = await client.post(f"/sessions/{session}/forward_backward", json={"seq": seq, "data": data})
            assert response.status_code == 202, response.text
            return response.json()["id"]

        return list(await asyncio.gather(*[submit(seq) for seq in range(1, count + 1)]))


def _data(rng: random.Random, vocab_size: int, datums: int, length: int) -> list[dict[str, Any]]:
    rows_ = [[rng.randrange(vocab_size) for _ in range(length + 1)] for _ in range(datums)]
    return [
        {
            "model_input": tokens[:-1],
            "loss_fn_inputs": {"target_tokens": tokens[1:], "weights": [1.0] * length},
        }
        for tokens in rows_
    ]
