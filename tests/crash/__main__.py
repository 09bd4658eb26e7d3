"""``python -m tests.crash SUITE``; ``make`` has a target for each."""

import os
import signal
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tests.crash.report import Verdict, show
from tests.crash.suites import acks as acks_suite
from tests.crash.suites import kills, pauses, recovery
from tests.crash.suites.common import WORK, Options

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

Rounds = Annotated[int, typer.Option("--rounds", min=1, help="How often to strike.")]
Seed = Annotated[int, typer.Option(min=0, help="Decides everything that is random.")]
Database = Annotated[str, typer.Option(help="sqlite or postgres.")]
Engine = Annotated[str, typer.Option(help="scripted, or vllm: the real engine, always from cold.")]
Cold = Annotated[bool, typer.Option(help="Start programs as operators do, not forked from a warm parent.")]
Work = Annotated[Path, typer.Option(help="Where histories, logs and data of a failed run stay.")]


def _options(database: str, seed: int, engine: str, cold: bool, work: Path) -> Options:
    if database not in ("sqlite", "postgres") or engine not in ("scripted", "vllm"):
        raise typer.BadParameter("DB is sqlite or postgres, ENGINE is scripted or vllm")
    return Options(database=database, seed=seed, vllm=engine == "vllm", cold=cold, work=work)


def _end(console: Console, verdict: Verdict) -> None:
    show(console, verdict)
    raise typer.Exit(0 if verdict.passed else 1)


@app.command()
def crash(
    rounds: Rounds = 20,
    seed: Seed = 1,
    database: Database = "sqlite",
    engine: Engine = "scripted",
    cold: Cold = False,
    work: Work = WORK,
) -> None:
    """SIGKILL trainer (half of the rounds), gateway (3 in 10), engine or everything (1 in 10 each)."""
    console = Console()
    _end(console, kills.crash(rounds, _options(database, seed, engine, cold, work), console))


@app.command()
def chaos(
    operations: Annotated[int, typer.Option(min=40, help="How many operations to send.")] = 2000,
    seed: Seed = 1,
    database: Database = "sqlite",
    work: Work = WORK,
) -> None:
    """Duplicate, drop, delay and reorder requests."""
    console = Console()
    _end(console, kills.chaos(operations, _options(database, seed, "scripted", False, work), console))


@app.command()
def faults(rounds: Rounds = 20, seed: Seed = 1, database: Database = "sqlite", work: Work = WORK) -> None:
    """SIGTERM, failing fsyncs and writes, a full disk, database restarts."""
    console = Console()
    _end(console, kills.faults(rounds, _options(database, seed, "scripted", False, work), console))


@app.command("pauses")
def paused(rounds: Rounds = 100, seed: Seed = 1, database: Database = "sqlite", work: Work = WORK) -> None:
    """Stop a computing trainer beyond its lease, let another one take over, wake it."""
    console = Console()
    _end(console, pauses.pauses(rounds, _options(database, seed, "scripted", False, work), console))


@app.command()
def saves(rounds: Rounds = 100, seed: Seed = 1, database: Database = "sqlite", work: Work = WORK) -> None:
    """Kill the trainer while it writes a version."""
    console = Console()
    _end(console, pauses.saves(rounds, _options(database, seed, "scripted", False, work), console))


@app.command()
def acks(
    count: Annotated[int, typer.Option(min=1, help="How many acknowledgements to follow.")] = 200,
    seed: Seed = 1,
    database: Database = "sqlite",
    failing: Annotated[bool, typer.Option(help="Make every fourth sync of the gateway fail.")] = False,
    work: Work = WORK,
) -> None:
    """Show with strace that every acknowledgement came after the fsync of what it needs."""
    console = Console()
    options = _options(database, seed, "scripted", False, work)
    _end(console, acks_suite.acks(count, options, console, failing=failing))


@app.command("recovery")
def recovering(
    model: Annotated[str, typer.Option(help="tiny or smollm2.")] = "tiny",
    seed: Seed = 1,
    database: Database = "sqlite",
    work: Work = WORK,
) -> None:
    """Measure how long a session that has run for long takes to come back after a kill of its trainer."""
    console = Console()
    _end(console, recovery.recovery(model, _options(database, seed, "scripted", True, work), console))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell starts with it ignored
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))  # leave nothing behind
    app()
