"""`loopline doctor`: looks at everything `loopline up` needs and says what to do about what is wrong."""

import asyncio
from collections.abc import Mapping
from dataclasses import asdict

import typer
from rich.markup import escape
from rich.table import Table

from gateway.cli.checks import Check, Verdict, run_checks
from gateway.cli.common import AsJson, DataDir, out, print_json, settings_of

_MARKS: Mapping[Verdict, str] = {
    Verdict.OK: "[green]ok[/]",
    Verdict.WARNING: "[yellow]warning[/]",
    Verdict.WRONG: "[bold red]wrong[/]",
}


def doctor(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Check this machine and data directory; exit status 1 when something is wrong."""
    checks = asyncio.run(run_checks(settings_of(data_dir)))
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        _print(checks)
    if any(check.verdict is Verdict.WRONG for check in checks):
        raise typer.Exit(1)


def _print(checks: list[Check]) -> None:
    table = Table.grid(padding=(0, 2))
    for check in checks:
        advice = f"\n[bold]->[/] {escape(check.advice)}" if check.advice else ""
        table.add_row(_MARKS[check.verdict], check.name, f"{escape(check.found)}{advice}")
    out().print(table)
