"""What every suite needs: where it works, on which model, and how it remembers what is done."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.crash.episodes import Run, Trouble, episode, references_of, unknowns
from tests.crash.launchers import Launcher, WarmLauncher
from tests.crash.plan import Fault, Plan
from tests.crash.processes import Setting
from tests.crash.report import Verdict, progress
from tests.tiny_model import FULL_VOCABULARY, ROOT, cached_tiny_model

SMALL_VOCABULARY = 512
WORK = ROOT / ".cache" / "crash"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line's choices. ``cold`` starts programs as operators do instead of forking a warm parent.

    ``launcher`` is a warm parent that is there already.
    """

    database: str = "sqlite"
    seed: int = 1
    vllm: bool = False
    cold: bool = False
    work: Path = WORK
    launcher: Launcher | None = None

    @contextmanager
    def launching(self, console: Console) -> Iterator[Launcher | None]:
        """Yield what starts processes; None: each stack starts its own from cold."""
        if self.cold or self.launcher is not None:
            yield self.launcher
            return
        self.work.mkdir(parents=True, exist_ok=True)
        with console.status("importing everything once"):
            launcher = WarmLauncher(self.work / "warm.log")
        try:
            yield launcher
        finally:
            launcher.close()

    @property
    def name(self) -> str:
        """What tells the files of one choice from those of another."""
        return f"{self.database}-{'vllm' if self.vllm else 'scripted'}"

    @property
    def vocab_size(self) -> int:
        return FULL_VOCABULARY if self.vllm else SMALL_VOCABULARY

    def setting(self, suite: str, seed: int, **more: Any) -> Setting:
        return Setting(
            directory=self.work / f"{suite}-{self.name}-{seed}",
            database=self.database,
            model=cached_tiny_model(vocab_size=self.vocab_size),
            vocab_size=self.vocab_size,
            vllm=self.vllm,
            warm=not self.cold,
            **more,
        )

    def words(self) -> str:
        """These choices as ``make`` takes them, without the seed."""
        return f"DB={self.database} ENGINE={'vllm' if self.vllm else 'scripted'}"


@dataclass(kw_only=True)
class Tally:
    """Sums over a suite's episodes; kept in a file, so that a suite that was cut short goes on where it was."""

    path: Path | None = None
    done: list[int] = field(default_factory=list[int])
    operations: int = 0
    unknown: int = 0
    seconds: float = 0.0
    worst_probe: float = 0.0
    worst_sample: float = 0.0
    samples: int = 0
    struck: Counter[str] = field(default_factory=Counter[str])

    @classmethod
    def load(cls, path: Path) -> "Tally":
        """Read what an earlier run of the same suite finished."""
        if not path.exists():
            return cls(path=path)
        stored: dict[str, Any] = json.loads(path.read_text())
        return cls(path=path, **{**stored, "struck": Counter(stored["struck"])})

    def add(self, seed: int, plan: Plan, run: Run, counts: Counter[str]) -> None:
        self.done.append(seed)
        self.operations += plan.operations
        self.unknown += unknowns(run)
        self.seconds += run.seconds
        self.worst_probe = max([self.worst_probe, *run.distances.values()])
        self.worst_sample = max([self.worst_sample, *run.sample_distances.values()])
        self.samples += len(run.sample_distances)
        self.struck += counts
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fields = {name: value for name, value in self.__dict__.items() if name != "path"}
            self.path.write_text(json.dumps(fields))

    def forget(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One episode to run, and the command that repeats it alone."""

    plan: Plan
    setting: Setting
    command: str
    chaos: bool = False
    may_exit: bool = False
    trouble: Trouble | None = None


def counts_of(run: Run) -> Counter[str]:
    struck = Counter({fault.value: count for fault, count in run.struck.items()})
    return struck + run.fates + Counter({failed_calls(fault): count for fault, count in run.failed_calls.items()})


def failed_calls(fault: Fault) -> str:
    """Return under which name a tally counts the system calls that a fault made fail."""
    return f"{fault.value}: calls that failed"


def run_episodes(
    verdict: Verdict,
    tally: Tally,
    seeds: list[int],
    make: Callable[[int], Episode],
    console: Console,
    *,
    options: Options,
    enough: Callable[[], bool] = lambda: False,
) -> None:
    """Run the episodes that are not done yet, until the first violation (or until ``enough``)."""
    with options.launching(console) as launcher, progress(console) as shown:
        for number, seed in enumerate(seeds, start=1):
            if seed in tally.done:
                continue
            one = make(seed)
            task = shown.add_task(f"episode {number} of {len(seeds)}, seed {seed}", total=one.plan.operations)
            references = references_of(one.plan, one.setting.model)
            run, found = asyncio.run(
                episode(
                    one.plan,
                    one.setting,
                    references,
                    launcher=launcher,
                    chaos=one.chaos,
                    may_exit=one.may_exit,
                    trouble=one.trouble,
                    progress=lambda final, task=task: shown.update(task, completed=final),
                )
            )
            shown.remove_task(task)
            if found:
                verdict.violations += [f"seed {seed}: {violation}" for violation in found]
                verdict.command = one.command
                return
            tally.add(seed, one.plan, run, counts_of(run))
            if enough():
                return


def summarise(verdict: Verdict, tally: Tally) -> None:
    """Add the lines that every suite has."""
    verdict.line("operations", tally.operations)
    verdict.line("calls with unknown outcome, retried", tally.unknown)
    verdict.line("acknowledged operations lost", _count(verdict, "lost"), "0")
    verdict.line("effects doubled or missing", _count(verdict, "billed", "differ", "versions"), "0")
    verdict.line("order violations", _count(verdict, "started before"), "0")
    verdict.line("futures without an end after 120 s", _count(verdict, "Stuck"), "0")
    verdict.line("worst probe against the reference", f"{tally.worst_probe:.1e} nats", "1e-4")
    if tally.samples:
        name = f"worst of {tally.samples} samples' tokens against the reference"
        verdict.line(name, f"{tally.worst_sample:.1e} nats", "1e-4")
    verdict.line("episodes bit-equal to their uninterrupted runs", len(tally.done))
    verdict.line("time under fire", f"{tally.seconds:.0f} s")


def _count(verdict: Verdict, *words: str) -> int:
    return sum(any(word in violation for word in words) for violation in verdict.violations)
