"""A real `loopline up` as a process of its own, with the engine and the trainer that need no weights."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from gateway.supervisor import groups
from gateway.supervisor.records import ChildRecord, RunDir
from tests.stack import free_port

MODEL = "smollm2-135m-instruct"
_TIMEOUT_S = 60.0


def clean_environment(**extra: str) -> dict[str, str]:
    """Return this process's environment without any setting of Loopline, and with ``extra``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LOOPLINE_")}
    return {**kept, "COLUMNS": "200", **extra}


def loopline(*arguments: str, env: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    """Run a command of the CLI to its end."""
    return subprocess.run(
        [sys.executable, "-m", "gateway.cli", *arguments],
        env=env or clean_environment(),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveUp:
    """A running `loopline up`."""

    process: "subprocess.Popen[bytes]"
    data_dir: Path
    port: int
    output: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def key(self) -> str:
        """The key that it printed."""
        found = re.search(r"^Key: (tml-\S+)$", self.output.read_text(), re.MULTILINE)
        assert found is not None, self.output.read_text()
        return found[1]

    def children(self) -> Mapping[str, ChildRecord]:
        return {record.name: record for record in RunDir(self.data_dir).children()}

    def environment(self) -> dict[str, str]:
        """Return what a client needs to know."""
        return clean_environment(LOOPLINE_BASE_URL=self.url, LOOPLINE_API_KEY=self.key)

    def client(self) -> httpx.Client:
        return httpx.Client(
            base_url=f"{self.url}/training/v1",
            headers={"Authorization": f"Bearer {self.key}"},
            timeout=_TIMEOUT_S,
            trust_env=False,
        )

    def wait_ready(self) -> None:
        """Return when it has announced itself and work would succeed."""
        wait_for(lambda: self._announced() and self.is_ready(), self.output)

    def _announced(self) -> bool:
        address = RunDir(self.data_dir).address() if self.data_dir.is_dir() else None
        return address is not None and address.pid == self.process.pid

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5.0, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout=_TIMEOUT_S)


@contextlib.contextmanager
def start_up(
    data_dir: Path, *arguments: str, port: int | None = None, env: Mapping[str, str] | None = None
) -> Generator[LiveUp]:
    """Start `loopline up` and yield at once; whatever is left of it afterwards is killed."""
    port = port or free_port()
    output = data_dir.parent / f"{data_dir.name}.output"
    command = [
        *(sys.executable, "-m", "gateway.cli", "up", "--engine", "scripted"),
        *("--port", str(port), "--data-dir", str(data_dir), *arguments),
    ]
    with output.open("ab") as stream:
        process = subprocess.Popen(
            command, env=dict(env or clean_environment(LOOPLINE_LEASE_S="2")), stdout=stream, stderr=stream
        )
    live = LiveUp(process=process, data_dir=data_dir, port=port, output=output)
    try:
        yield live
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30.0)
        process.kill()
        process.wait()
        if data_dir.is_dir():
            for record in RunDir(data_dir).children():
                groups.signal_group(record.pid, signal.SIGKILL)


def wait_for(condition: Any, output: Path, *, timeout_s: float = _TIMEOUT_S) -> None:
    """Return once ``condition()`` holds; else fail with what was printed."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.05)


def survivors(records: Sequence[ChildRecord]) -> list[int]:
    """Return the processes of the recorded groups that still live."""
    return [process.pid for record in records for process in groups.members(record.pid)]


def train_one_step(client: httpx.Client, session: str) -> str:
    """Train and save; return the address of the published version."""
    data = [{"model_input": [5, 6, 7], "loss_fn_inputs": {"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]}}]
    submitted = [
        client.post(f"/sessions/{session}/{verb}", json=body)
        for verb, body in (("forward_backward", {"data": data}), ("optim_step", {}), ("save_weights", {}))
    ]
    assert [response.status_code for response in submitted] == [202, 202, 202], [r.text for r in submitted]
    while True:
        operation = client.get(f"/operations/{submitted[-1].json()['id']}", params={"wait": 30}).json()
        if operation["status"] not in ("queued", "running"):
            assert operation["status"] == "completed", operation
            return operation["result"]["version"]
