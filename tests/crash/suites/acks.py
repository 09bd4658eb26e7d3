"""``make acks``: an acknowledgement leaves only after everything it needs was synced. strace is the witness.

With ``FAILING=1`` it also makes every fourth sync of each of the gateway's threads fail.
"""

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
from tests.crash.straced import Call, Needs, failed_syncs, parse, unhealed, unsupported
from tests.crash.suites.common import Options

AT_ONCE = 8
BIG_EVERY = 10
FAILING = "9+4"
_AGAIN = (503, 507)
_BIG_DATUMS, _BIG_LENGTH = 24, 700  # about 400 KiB stored: a file of its own


def acks(count: int, options: Options, console: Console, *, failing: bool = False) -> Verdict:
    """Follow ``count`` acknowledgements, every tenth of a body that is stored in a file."""
    command = f"make acks N={count} SEED={options.seed} DB={options.database}{' FAILING=1' if failing else ''}"
    verdict = Verdict(title=f"fsync before {count} acknowledgements on {options.database}", command=command)
    with options.launching(console) as launcher, console.status(f"following {count} acknowledgements"):
        calls, needs = asyncio.run(_follow(count, options, launcher, FAILING if failing else ""))
    log = "pg_wal/" if options.database == "postgres" else "loopline.db-wal"
    for one in needs:
        verdict.violations += unsupported(calls, one, log=log)
    if options.database == "sqlite":
        verdict.violations += unhealed(calls, needs, log=log)
    syncs = sum(call.name in ("fsync", "fdatasync") and log in call.path for call in calls)
    verdict.require(len(needs) == count, f"{len(needs)} operations were acknowledged")
    verdict.line("acknowledgements", len(needs), str(count))
    verdict.line("of them with a body file", sum(one.body_file is not None for one in needs))
    verdict.line("syncs of the database's log", syncs)
    if failing:
        failed = sum(call.name in ("fsync", "fdatasync") and call.result != 0 for call in calls)
        verdict.require(failed > 0, "no sync failed")
        verdict.line("syncs that failed", failed)
        verdict.line("of them of the database's log", len(failed_syncs(calls, log)))
    verdict.line("acknowledged before everything was on disk", len(verdict.violations), "0")
    return verdict


async def _follow(
    count: int, options: Options, launcher: Launcher | None, failing: str
) -> tuple[Sequence[Call], Sequence[Needs]]:
    # No trainer: it writes to the same log.
    setting = options.setting("acks", options.seed, traced=True, failing=failing, trainers=0)
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
        opened = await _insist(client, "/sessions", {"base_model": stack.setting.name, "lora": {"rank": 4}})
        assert opened.status_code == 201, opened.text
        session, slots = opened.json()["id"], asyncio.Semaphore(AT_ONCE)

        async def submit(seq: int) -> str:
            big = seq % BIG_EVERY == 0
            data = _data(rng, stack.setting.vocab_size, *((_BIG_DATUMS, _BIG_LENGTH) if big else (1, 8)))
            async with slots:
                response = await _insist(client, f"/sessions/{session}/forward_backward", {"seq": seq, "data": data})
            assert response.status_code == 202, response.text
            return response.json()["id"]

        return list(await asyncio.gather(*[submit(seq) for seq in range(1, count + 1)]))


async def _insist(client: httpx.AsyncClient, path: str, body: Any) -> httpx.Response:
    """Send ``body`` until the gateway could write it down."""
    while (response := await client.post(path, json=body)).status_code in _AGAIN:
        pass
    return response


def _data(rng: random.Random, vocab_size: int, datums: int, length: int) -> list[dict[str, Any]]:
    rows_ = [[rng.randrange(vocab_size) for _ in range(length + 1)] for _ in range(datums)]
    return [
        {
            "model_input": tokens[:-1],
            "loss_fn_inputs": {"target_tokens": tokens[1:], "weights": [1.0] * length},
        }
        for tokens in rows_
    ]
