"""``make pauses``: two trainers; the one that computes is stopped for longer than its lease, replaced, and woken.

``make saves``: the trainer is killed while it writes a version.
"""

import asyncio
import json
import os
import random
import re
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError

from tests.crash.driver import Driver
from tests.crash.oracles.sql import connected, damaged, rows
from tests.crash.plan import Plan, Style, draw_plan
from tests.crash.processes import Stack
from tests.crash.report import Verdict
from tests.crash.suites.common import Episode, Options, Tally, run_episodes, summarise

LEASE_S = 1.0
TAKEOVER_S = 60.0
COMMIT_S = 3.0  # far more than a commit takes
OPERATIONS_PER_EPISODE = 160
OPERATIONS_PER_ROUND = 24
_RUNNING = (
    "SELECT o.id, s.id AS session_id, s.epoch, s.lease_owner FROM operations o JOIN sessions s ON s.id = o.session_id"
    " WHERE o.status = 'running' AND NOT o.staged"
)


class Pauses:
    """Stops the holder of a lease in the middle of an operation, again and again. ``done`` counts takeovers."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.done = 0

    async def run(self, stack: Stack, driver: Driver, plan: Plan) -> None:
        rng = random.Random(plan.seed)
        victims: set[str] = set()
        while self.done < self.wanted:
            await asyncio.sleep(rng.uniform(0, 0.3))
            if (held := await asyncio.to_thread(_running, stack)) is None or held["id"] in victims:
                continue  # a session whose rebuilding is hit again and again would be given up, by contract
            victims.add(held["id"])
            pid = _holder(stack, held["lease_owner"])
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                try:
                    if await asyncio.to_thread(_in_a_commit, stack):
                        continue
                    driver.note("pause", {"pid": pid, **held})
                    taken = await self._taken_over(stack, held)
                    await asyncio.sleep(rng.uniform(0, 0.5))
                finally:
                    os.kill(pid, signal.SIGCONT)
                self.done += taken

    def judge(self, stack: Stack) -> list[str]:
        """Every operation was committed by one trainer, once: what a stale one computed was refused."""
        reports = Counter(
            event["operation_id"]
            for name in stack.names("trainer")
            for event in _events(stack.log(name))
            if event.get("event") == "operation_done"
        )
        return [f"{id}: committed {count} times" for id, count in reports.items() if count > 1]

    async def _taken_over(self, stack: Stack, held: dict[str, Any]) -> bool:
        """Wait until another trainer has the session; False when the pause came after the operation's end."""
        until = time.monotonic() + TAKEOVER_S
        while time.monotonic() < until:
            await asyncio.sleep(0.05)
            session = await asyncio.to_thread(_session, stack, held["session_id"])
            if session is not None and session["epoch"] > held["epoch"]:
                return True
            if session is not None and not session["running"]:
                return False
        raise TimeoutError(f"nobody took over session {held['session_id']} in {TAKEOVER_S:g} s")


class KilledSaves:
    """Kills the trainer at a random moment of the writing of a version; ``done`` counts kills."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.done = 0
        self.inside = 0  # kills that left a staging directory: the save was really under way
        self._partial: list[str] = []

    async def run(self, stack: Stack, driver: Driver, plan: Plan) -> None:
        rng = random.Random(plan.seed)
        staging = stack.data_dir / "artifacts" / ".staging"
        takes_s = 0.03
        victims: set[str] = set()
        while self.done < self.wanted:
            before = _entries(staging)
            while not (new := _entries(staging) - before):
                await asyncio.sleep(0.001)
                before &= _entries(staging)
            if victims & {str(row["id"]) for row in await asyncio.to_thread(_all_running, stack)}:
                continue  # an operation that was hit twice would be given up, by contract
            await asyncio.sleep(rng.uniform(0, takes_s))
            stack.kill("trainer-0")
            self.inside += bool(_entries(staging) & new)
            self.done += 1
            driver.note("kill during a save", sorted(new))
            victims = {str(row["id"]) for row in await asyncio.to_thread(_all_running, stack)}
            self._partial += await asyncio.to_thread(_listed_and_damaged, stack)

    def judge(self, stack: Stack) -> list[str]:
        """Nothing partial was ever listed."""
        return self._partial


def _holder(stack: Stack, owner: str) -> int:
    """Return which trainer signs as ``owner``: its name holds its pid."""
    pids = [stack.members[name].pid for name in stack.names("trainer")]
    return next(pid for pid in pids if re.search(rf"(?<!\d){pid}(?!\d)", owner))


def _in_a_commit(stack: Stack) -> bool:
    """Whether a stopped process holds SQLite's one write lock: nobody can commit then, so nobody takes over either."""
    url = make_url(stack.database_url)
    if url.get_backend_name() != "sqlite":
        return False
    assert url.database is not None
    with closing(sqlite3.connect(url.database, timeout=COMMIT_S, isolation_level=None)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
    return False


def _entries(directory: Path) -> set[str]:
    try:
        return set(os.listdir(directory))
    except FileNotFoundError:
        return set()


def _events(log: Path) -> Iterator[dict[str, Any]]:
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith("{"):
            with suppress(ValueError):
                yield json.loads(line)


def _query(stack: Stack, query: str, **values: Any) -> list[dict[str, Any]]:
    """Ask the database; nothing while it is away."""
    with suppress(SQLAlchemyError), connected(stack.database_url) as connection:
        return [dict(row) for row in rows(connection, query, **values)]
    return []


def _running(stack: Stack) -> dict[str, Any] | None:
    found = _query(stack, f"{_RUNNING} AND o.attempts = 1 AND s.lease_owner IS NOT NULL")
    return found[0] if found else None


def _all_running(stack: Stack) -> list[dict[str, Any]]:
    return _query(stack, _RUNNING)


def _session(stack: Stack, session_id: str) -> dict[str, Any] | None:
    running = f"(SELECT count(*) FROM ({_RUNNING} AND s.id = :id) r) AS running"
    found = _query(stack, f"SELECT epoch, {running} FROM sessions WHERE id = :id", id=session_id)
    return found[0] if found else None


def _listed_and_damaged(stack: Stack) -> list[str]:
    listed = _query(stack, "SELECT location, manifest_sha256 FROM versions")
    artifacts = stack.data_dir / "artifacts"
    return [
        wrong for version in listed for wrong in damaged(artifacts / version["location"], version["manifest_sha256"])
    ]


def _operations(rounds: int) -> int:
    return min(OPERATIONS_PER_EPISODE, OPERATIONS_PER_ROUND * (rounds + 1))


def pauses(rounds: int, options: Options, console: Console) -> Verdict:
    """Let ``rounds`` leases run out under a worker that computes."""
    command = f"make pauses N={rounds} SEED={options.seed} DB={options.database}"
    verdict = Verdict(title=f"{rounds} paused workers on {options.database}", command=command)
    tally, paused = Tally(), Pauses(rounds)
    environment = {"LOOPLINE_LEASE_S": f"{LEASE_S:g}", "LOOPLINE_HEARTBEAT_S": "0.2"}

    def make(seed: int) -> Episode:
        plan = draw_plan(
            seed, operations=_operations(rounds), sessions=4, vocab_size=options.vocab_size, style=Style.LONG
        )
        setting = options.setting("pauses", seed, trainers=2, environment=environment)
        return Episode(plan=plan, setting=setting, command=command, trouble=paused)

    seeds = [options.seed + index for index in range(rounds)]
    run_episodes(verdict, tally, seeds, make, console, options=options, enough=lambda: paused.done >= rounds)
    verdict.line("takeovers from a paused worker", paused.done, str(rounds))
    verdict.line("stale commits", sum("committed" in violation for violation in verdict.violations), "0")
    verdict.require(paused.done >= rounds, f"only {paused.done} takeovers")
    summarise(verdict, tally)
    return verdict


def saves(rounds: int, options: Options, console: Console) -> Verdict:
    """Kill the trainer ``rounds`` times while it writes a version."""
    command = f"make saves N={rounds} SEED={options.seed} DB={options.database}"
    verdict = Verdict(title=f"{rounds} kills during saves on {options.database}", command=command)
    tally, killed = Tally(), KilledSaves(rounds)

    def make(seed: int) -> Episode:
        plan = draw_plan(
            seed, operations=_operations(rounds), sessions=4, vocab_size=options.vocab_size, style=Style.SAVES
        )
        return Episode(plan=plan, setting=options.setting("saves", seed), command=command, trouble=killed)

    seeds = [options.seed + index for index in range(rounds)]
    run_episodes(verdict, tally, seeds, make, console, options=options, enough=lambda: killed.done >= rounds)
    verdict.line("kills while a version was written", killed.done, str(rounds))
    verdict.line("of them before it was complete", killed.inside)
    verdict.line("partial versions listed", sum("lists" in violation for violation in verdict.violations), "0")
    verdict.require(killed.done >= rounds, f"only {killed.done} kills")
    summarise(verdict, tally)
    return verdict
