"""Telling the user what goes on, and running children that end with us. Standard library only."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path


class Refusal(Exception):
    """Set-up cannot go on; the message says why and what to do."""


def say(message: str) -> None:
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()


def say_over(message: str) -> None:
    """Replace the last line on a terminal; elsewhere write a new one."""
    sys.stderr.write(f"\r\033[K{message}" if sys.stderr.isatty() else f"{message}\n")
    sys.stderr.flush()


def elapsed(since: float) -> str:
    """Minutes and seconds since a `time.monotonic()` value."""
    minutes, seconds = divmod(int(time.monotonic() - since), 60)
    return f"{minutes}:{seconds:02}"


def run(command: Sequence[str | Path], *, cwd: Path, env: dict[str, str]) -> int:
    """Run a child to its end, its output passed through, and return its exit status."""
    return _finish(_start(command, cwd=cwd, env=env, output=None), progress=None)


def run_logged(
    command: Sequence[str | Path], *, cwd: Path, env: dict[str, str], log: Path, progress: Callable[[], str]
) -> int:
    """Run a child with its output in `log`, showing what `progress()` says until it ends."""
    with log.open("w") as output:
        return _finish(_start(command, cwd=cwd, env=env, output=output.fileno()), progress=progress)


def _start(
    command: Sequence[str | Path], *, cwd: Path, env: dict[str, str], output: int | None
) -> subprocess.Popen[bytes]:
    # A process group of its own: an interruption ends the whole group, also pip's and compileall's children.
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        start_new_session=True,
    )


def _finish(child: subprocess.Popen[bytes], *, progress: Callable[[], str] | None) -> int:
    started = shown = time.monotonic()
    interval_s = 0.5 if sys.stderr.isatty() else 20.0
    try:
        while True:
            try:
                return child.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                if progress and time.monotonic() - shown >= interval_s:
                    shown = time.monotonic()
                    say_over(f"      {progress()} ({elapsed(started)})")
    except KeyboardInterrupt:
        os.killpg(child.pid, signal.SIGTERM)
        child.wait()
        raise
    finally:
        if progress and sys.stderr.isatty():
            say_over("")
