"""Measuring in turn, and what is printed: a table at the end, and a line ``RATIO <name> <value>`` for every bar."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

BARS = {
    "sft": 1.4,
    "grpo_short": 3.0,
    "grpo_long": 4.5,
    "memory": 1.6,
    "end_to_end": 0.93,
    "fidelity": 0.99,
    "lora_sampling": 0.6,
    "tenants8": 1.2,
}
Clock = Callable[[], float]  # in seconds
LONG_PEAK_GIB = 4.0  # grpo_long has to run in less


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What to time."""

    name: str
    run: Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Seconds of one side, round by round."""

    seconds: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def spread(self, factor: float = 1.0, digits: int = 3) -> str:
        low, high = min(self.seconds) * factor, max(self.seconds) * factor
        return f"{low:.{digits}f} to {high:.{digits}f}"


def alternate(sides: Sequence[Side], times: int, clock: Clock = time.perf_counter) -> dict[str, Timed]:
    """Time the sides in turn, ``times`` rounds after an untimed one: a noisy machine disturbs all of them."""
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    for turn in range(times + 1):
        for side in sides:
            start = clock()
            side.run()
            if turn:
                seconds[side.name].append(clock() - start)
    return {name: Timed(seconds=values) for name, values in seconds.items()}


@dataclass(slots=True)
class Report:
    """Collects lines, and says each as it comes."""

    console: Console = field(default_factory=lambda: Console(highlight=False, soft_wrap=True))
    _lines: list[tuple[str, str, str, str, str]] = field(default_factory=list[tuple[str, str, str, str, str]])
    _ratios: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, row: str, what: str, value: str, spread: str = "", note: str = "") -> None:
        self._lines.append((row, what, value, spread, note))
        self.console.print(f"[dim]{row:14} {what:34} {value:>14}  {spread:20} {note}[/]")

    def seconds(self, row: str, what: str, timed: Timed, note: str = "") -> None:
        self.add(row, what, f"{timed.median:.3f} s", timed.spread(), note)

    def milliseconds(self, row: str, what: str, timed: Timed, note: str = "") -> None:
        self.add(row, what, f"{timed.median * 1e3:.1f} ms", timed.spread(1e3, 1), note)

    def ratio(self, name: str, value: float, note: str = "") -> None:
        verdict = "[green]holds[/]" if value >= BARS[name] else "[red]missed[/]"
        self.add(name, f"[bold]ratio[/], bar {BARS[name]:g}: {verdict}", f"[bold]{value:.4g}[/]", "", note)
        self._ratios[name] = value

    def finish(self) -> None:
        """Print everything once more as a table, and the ratios for programs."""
        table = Table("row", "what", "median", "min to max", "", header_style="bold")
        table.columns[2].justify = table.columns[3].justify = "right"
        previous = ""
        for row, *cells in self._lines:
            if row != previous and previous:
                table.add_section()
            table.add_row("" if row == previous else row, *cells)
            previous = row
        self.console.print(table)
        for name, value in self._ratios.items():
            self.console.print(f"RATIO {name} {value:.4g}")
