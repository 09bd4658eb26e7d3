"""``make crash``: SIGKILL of trainer, gateway, engine or everything, at random moments.

``make chaos``: duplicated, dropped, delayed and reordered requests. ``make faults``: everything that is not a kill.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from tests.crash.plan import KILLS, Fault, Style, draw_plan
from tests.crash.proxy import Odds
from tests.crash.report import Verdict
from tests.crash.suites.common import Episode, Options, Tally, failed_calls, run_episodes, summarise

ROUNDS_PER_EPISODE = 20
OPERATIONS_PER_ROUND = 12
OPERATIONS_PER_REAL_ROUND = 6  # a kill of a vLLM costs as much time as a hundred operations
OPERATIONS_PER_EPISODE = 240  # four sessions of 60: beyond that float32 drifts from the float64 reference
SESSIONS = 4
_TMPFS_BYTES = 64 * 1024 * 1024


def crash(rounds: int, options: Options, console: Console) -> Verdict:
    """Kill ``rounds`` times, in episodes of at most 20 rounds: seed, seed + 1, ..."""
    command = f"make crash N={rounds} SEED={options.seed} {options.words()}"
    verdict = Verdict(title=f"{rounds} kills on {options.database}", command=command)
    sizes = _split(rounds, ROUNDS_PER_EPISODE)
    tally = Tally.load(options.work / f"crash-{options.name}-{options.seed}-{rounds}.json")
    seeds = [options.seed + index for index in range(len(sizes))]

    def make(seed: int) -> Episode:
        size = sizes[seed - options.seed]
        plan = draw_plan(
            seed,
            operations=(OPERATIONS_PER_REAL_ROUND if options.vllm else OPERATIONS_PER_ROUND) * size,
            sessions=SESSIONS,
            strikes=size,
            vocab_size=options.vocab_size,
        )
        repeat = f"make crash N={size} SEED={seed} {options.words()}"
        return Episode(plan=plan, setting=options.setting("crash", seed), command=repeat)

    run_episodes(verdict, tally, seeds, make, console, options=options)
    for fault in KILLS:
        verdict.line(fault.value, tally.struck[fault.value])
    summarise(verdict, tally)
    if verdict.passed:
        tally.forget()
    return verdict


def chaos(operations: int, options: Options, console: Console) -> Verdict:
    """Send ``operations`` through the proxy, in episodes."""
    command = f"make chaos OPS={operations} SEED={options.seed} DB={options.database}"
    verdict = Verdict(title=f"{operations} operations through the chaos proxy on {options.database}", command=command)
    sizes = _split(operations, OPERATIONS_PER_EPISODE)
    tally = Tally.load(options.work / f"chaos-{options.name}-{options.seed}-{operations}.json")

    def make(seed: int) -> Episode:
        size = sizes[seed - options.seed]
        plan = draw_plan(seed, operations=size, sessions=SESSIONS, vocab_size=options.vocab_size)
        repeat = f"make chaos OPS={size} SEED={seed} DB={options.database}"
        return Episode(plan=plan, setting=options.setting("chaos", seed), command=repeat, chaos=True)

    seeds = [options.seed + index for index in range(len(sizes))]
    run_episodes(verdict, tally, seeds, make, console, options=options)
    requests = tally.struck.total() or 1
    for fate in ("duplicate", "drop", "delay", "reorder", "cut"):
        share = f"{100 * getattr(Odds(), fate):.0f} %"
        verdict.line(f"requests: {fate}", f"{100 * tally.struck[fate] / requests:.1f} % of {requests}", share)
    summarise(verdict, tally)
    if verdict.passed:
        tally.forget()
    return verdict


def faults(rounds: int, options: Options, console: Console) -> Verdict:
    """Strike ``rounds`` times with what is not a kill: SIGTERM, I/O errors, no space, a database restart."""
    command = f"make faults N={rounds} SEED={options.seed} DB={options.database}"
    verdict = Verdict(title=f"{rounds} other faults on {options.database}", command=command)
    pack = [Fault.TERM_TRAINER, Fault.TERM_GATEWAY]
    if options.database == "postgres":
        injected = [Fault.FSYNC_ERROR_TRAINER, Fault.FSYNC_ERROR_DATABASE, Fault.NO_SPACE_DATABASE]
        pack += [*injected, Fault.RESTART_DATABASE]
    else:
        injected = [Fault.FSYNC_ERROR_GATEWAY, Fault.WRITE_ERROR_GATEWAY, Fault.NO_SPACE_GATEWAY]
        injected += [Fault.FSYNC_ERROR_TRAINER, Fault.WRITE_ERROR_TRAINER, Fault.NO_SPACE_TRAINER]
        pack += injected
    sizes = _split(rounds, ROUNDS_PER_EPISODE)
    tally = Tally()
    with small_disk(wanted=options.database == "sqlite") as disk:
        pack += [Fault.FULL_DISK] if disk else []

        def make(seed: int) -> Episode:
            size = sizes[seed - options.seed]
            plan = draw_plan(
                seed,
                operations=OPERATIONS_PER_ROUND * size,
                sessions=SESSIONS,
                strikes=size,
                faults=pack,
                vocab_size=options.vocab_size,
                style=Style.FRAIL,
            )
            repeat = f"make faults N={size} SEED={seed} DB={options.database}"
            setting = options.setting("faults", seed, disk=disk)
            return Episode(plan=plan, setting=setting, command=repeat, may_exit=True)

        seeds = [options.seed + index for index in range(len(sizes))]
        run_episodes(verdict, tally, seeds, make, console, options=options)
    for fault in pack:
        verdict.line(fault.value, tally.struck[fault.value])
    for fault in injected if verdict.passed else ():
        failed = tally.struck[failed_calls(fault)]
        verdict.line(failed_calls(fault), failed, "> 0")
        verdict.require(failed > 0 or not tally.struck[fault.value], f"{fault.value}: no call failed")
    if disk is None and options.database == "sqlite":
        verdict.line(Fault.FULL_DISK.value, "not run: no right to mount a tmpfs")
    summarise(verdict, tally)
    return verdict


@contextmanager
def small_disk(*, wanted: bool) -> Iterator[Path | None]:
    """Mount a tmpfs of 64 MiB where that is allowed; yield where, None where it is not."""
    directory = Path(tempfile.mkdtemp(prefix="loopline-disk-"))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_TMPFS_BYTES}", "loopline-crash", str(directory)]
    mounted = wanted and os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield directory if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(directory)], check=False)
        shutil.rmtree(directory, ignore_errors=True)


def _split(total: int, size: int) -> list[int]:
    return [size] * (total // size) + ([total % size] if total % size else [])
