"""What a suite found, and showing it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A measured fact and, where there is one, the bar it is held to."""

    name: str
    value: str
    bar: str = ""


@dataclass(kw_only=True)
class Verdict:
    """A suite's result; any violation fails it. ``command`` repeats it."""

    title: str
    command: str
    lines: list[Line] = field(default_factory=list[Line])
    violations: list[str] = field(default_factory=list[str])

    @property
    def passed(self) -> bool:
        return not self.violations

    def line(self, name: str, value: object, bar: str = "") -> None:
        self.lines.append(Line(name=name, value=str(value), bar=bar))

    def require(self, holds: bool, violation: str) -> None:
        if not holds:
            self.violations.append(violation)


def show(console: Console, verdict: Verdict) -> None:
    """Print the final table and the violations, with the command that repeats them."""
    table = Table(title=verdict.title, title_justify="left", show_edge=False)
    table.add_column("measured")
    table.add_column("value", justify="right")
    table.add_column("bar", justify="right", style="dim")
    for line in verdict.lines:
        table.add_row(line.name, line.value, line.bar)
    console.print(table)
    for violation in verdict.violations[:40]:
        console.print(f"  [red]✗[/] {violation}", soft_wrap=True, highlight=False)
    if len(verdict.violations) > 40:
        console.print(f"  ... and {len(verdict.violations) - 40} more")
    if verdict.passed:
        console.print(f"[bold green]passed[/]  {verdict.command}", soft_wrap=True)
    else:
        console.print(f"[bold red]{len(verdict.violations)} violations[/]; repeat: {verdict.command}", soft_wrap=True)


@contextmanager
def progress(console: Console, columns: Sequence[str] = ()) -> Iterator[Progress]:
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        *[TextColumn(f"{{task.fields[{name}]}}") for name in columns],
        console=console,
        transient=True,
    ) as shown:
        yield shown
