"""Where a recipe runs: a server, the directory of its base model, and a directory for the recipe's own logs."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.stack import end_group

RENDERER = "qwen3_instruct"  # ChatML, which is what the base model's own template writes
PROGRAM_TIMEOUT_S = 2400.0
Options = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a program of the cookbook needs to run against a server.

    ``model`` is a directory with weights and tokenizer; the server knows its base model by the same path. ``rank`` is
    that of every adapter whose program lets it be chosen.
    """

    url: str
    key: str
    model: Path
    work: Path
    rank: int = 8

    @property
    def base_url(self) -> str:
        return f"{self.url}/tinker"

    def log_path(self, run: str) -> Path:
        """Return the directory that the program of ``run`` logs to."""
        return self.work / run

    def finish(self, run: str, module: str, options: Options) -> Path:
        """Run ``python -m module option=value ...`` to its end and return its log directory.

        Raises:
            AssertionError: its exit status is not 0; with the end of its output.
        """
        with self._started(run, module, options) as program:
            try:
                status = program.wait(timeout=PROGRAM_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                status = f"none after {PROGRAM_TIMEOUT_S:g} s"
        assert status == 0, f"{run} ended with exit status {status}\n{self._output(run)}"
        return self.log_path(run)

    def kill_once(self, run: str, module: str, options: Options, reached: Callable[[Path], bool]) -> None:
        """Run a program until ``reached(its log directory)``, then kill it with SIGKILL."""
        with self._started(run, module, options) as program:
            while not reached(self.log_path(run)):
                assert program.poll() is None, f"{run} ended too early\n{self._output(run)}"
                time.sleep(0.02)
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()

    @contextmanager
    def _started(self, run: str, module: str, options: Options) -> Iterator["subprocess.Popen[bytes]"]:
        words = [f"{name}={value}" for name, value in {"log_path": self.log_path(run), **options}.items()]
        self.work.mkdir(parents=True, exist_ok=True)
        with (self.work / f"{run}.out").open("ab") as output:
            program = subprocess.Popen(
                [sys.executable, "-m", *module.split(), *words],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                yield program
            finally:
                end_group(program)

    def _environment(self) -> dict[str, str]:
        """Nothing outside can be reached: no hub, and no proxy for the one page that the cookbook reads."""
        return {
            **os.environ,
            "TINKER_BASE_URL": self.base_url,
            "TINKER_API_KEY": self.key,
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": str(self.work / "hf"),
            "HTTPS_PROXY": "http://127.0.0.1:9",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def _output(self, run: str) -> str:
        return (self.work / f"{run}.out").read_text(errors="replace")[-6000:]


def lines(path: Path) -> list[dict[str, object]]:
    """Return the objects of a JSONL file; none where there is no file. A line still being written is left out."""
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def curve(log_path: Path, metric: str) -> list[float]:
    """Return a metric's values in the order of steps, from the program's own log.

    Raises:
        AssertionError: it was never logged; names the metrics that were.
    """
    rows = lines(log_path / "metrics.jsonl")
    values = [float(str(row[metric])) for row in rows if metric in row]
    assert values, f"{log_path.name} never logged {metric}, only {sorted({name for row in rows for name in row})}"
    return values
