"""Starting a program in a session of its own: from cold as operators do, or forked from the warm parent."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from gateway.supervisor import groups

MODULES = {
    "gateway": "gateway",
    "trainer": "trainer",
    "engine": "tests.crash.engine",
    "planted": "tests.crash.planted",
}


class Launcher(Protocol):
    """Starts and reaps processes. A started process leads its own process group."""

    def start(self, program: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> int: ...

    def reap(self, pid: int) -> int:
        """Wait for the end of ``pid``; return its exit status, negative for a signal."""
        ...

    def close(self) -> None: ...


class ColdLauncher:
    """``python -m PROGRAM``, or any command."""

    def __init__(self) -> None:
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, program: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        return self.run([sys.executable, "-m", MODULES[program], *arguments], environment, log)

    def run(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        with log.open("ab") as output:
            child = subprocess.Popen(
                command, env=dict(environment), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._children[child.pid] = child
        return child.pid

    def reap(self, pid: int) -> int:
        return self._children.pop(pid).wait()

    def close(self) -> None:
        for pid in list(self._children):
            groups.signal_group(pid, signal.SIGKILL)
            self.reap(pid)


class WarmLauncher:
    """Forks from ``tests.crash.warm``; see there."""

    def __init__(self, log: Path) -> None:
        with log.open("ab") as output:
            self._parent = subprocess.Popen(
                [sys.executable, "-m", "tests.crash.warm"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        self._one_at_a_time = threading.Lock()
        assert self._answer() == "ready", log.read_text()

    def start(self, program: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        request = {"program": program, "arguments": list(arguments), "environment": dict(environment), "log": str(log)}
        return int(self._ask(request))

    def reap(self, pid: int) -> int:
        return int(self._ask({"wait": pid}))

    def close(self) -> None:
        self._parent.communicate()

    def _ask(self, request: Mapping[str, object]) -> str:
        assert self._parent.stdin is not None
        with self._one_at_a_time:
            self._parent.stdin.write(json.dumps(request) + "\n")
            self._parent.stdin.flush()
            return self._answer()

    def _answer(self) -> str:
        assert self._parent.stdout is not None
        return self._parent.stdout.readline().strip()


def gone(pid: int) -> bool:
    """Whether ``pid`` has ended (it may still have to be reaped)."""
    return groups.process_info(pid) is None


def wait_gone(pid: int, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not gone(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
