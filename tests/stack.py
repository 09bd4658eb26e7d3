"""A running Loopline for tests: the real gateway and the real trainer as processes, in front of a given engine.

The engine is the expensive part and is shared by a whole test session, so it is passed in; a stack itself is ready
in a few seconds and is thrown away with its data directory.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx

READY_TIMEOUT_S = 120.0


def free_port() -> int:
    """Return a TCP port of the loopback interface that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEndpoint:
    """An engine that already runs, and what a catalogue has to say about it."""

    name: str
    url: str
    key: str
    model_path: Path
    dtype: str
    vocab_size: int
    context_length: int
    max_lora_rank: int
    max_loras: int
    tool_parser: str | None = None

    def catalog(self) -> str:
        return "\n".join(
            [
                f"[models.{self.name}]",
                f"path = {json.dumps(str(self.model_path))}",
                f'dtype = "{self.dtype}"',
                f"vocab_size = {self.vocab_size}",
                f"context_length = {self.context_length}",
                f"max_lora_rank = {self.max_lora_rank}",
                f"max_loras = {self.max_loras}",
                f"engines = [{json.dumps(self.url)}]",
                *([] if self.tool_parser is None else [f"tool_parser = {json.dumps(self.tool_parser)}"]),
                "",
            ]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One running gateway with its trainer."""

    url: str
    key: str
    data_dir: Path
    base_model: str
    gateway: "subprocess.Popen[bytes]"
    trainer: "subprocess.Popen[bytes]"

    def client(self, *, key: str | None = None, timeout_s: float = 120.0) -> httpx.Client:
        """Return a client of the native REST surface."""
        return httpx.Client(
            base_url=f"{self.url}/training/v1",
            headers={"Authorization": f"Bearer {key or self.key}"},
            timeout=timeout_s,
        )

    def run(self, client: httpx.Client, session_id: str, verb: str, **body: Any) -> dict[str, Any]:
        """Submit one operation, wait for it, and return it; it must complete."""
        operation = self.submit(client, session_id, verb, **body)
        return self.finish(client, operation["id"])

    def submit(self, client: httpx.Client, session_id: str, verb: str, **body: Any) -> dict[str, Any]:
        response = client.post(f"/sessions/{session_id}/{verb}", json=body)
        assert response.status_code == 202, response.text
        return response.json()

    def finish(self, client: httpx.Client, operation_id: str) -> dict[str, Any]:
        while True:
            operation = client.get(f"/operations/{operation_id}", params={"wait": 60}).json()
            if operation["status"] not in ("queued", "running"):
                assert operation["status"] == "completed", operation
                return operation


@contextmanager
def running_stack(
    engine: EngineEndpoint, data_dir: Path, *, extra_env: dict[str, str] | None = None
) -> Iterator[Stack]:
    """Start gateway and trainer on a fresh data directory, yield when ready, and end both process groups."""
    data_dir.mkdir(parents=True, exist_ok=True)
    catalog = data_dir / "catalog.toml"
    catalog.write_text(engine.catalog())
    port = free_port()
    env = {
        **os.environ,
        "LOOPLINE_DATA_DIR": str(data_dir),
        "LOOPLINE_CATALOG": str(catalog),
        "LOOPLINE_ENGINE_KEY": engine.key,
        "LOOPLINE_PORT": str(port),
        "LOOPLINE_BASE_MODEL": engine.name,
        "HF_HUB_OFFLINE": "1",
        **(extra_env or {}),
    }
    _run([sys.executable, "-m", "gateway.cli", "db", "upgrade"], env)
    created = _run([sys.executable, "-m", "gateway.cli", "keys", "create", "tests", "--json"], env)
    key = json.loads(created)["key"]
    with ExitStack() as running:
        gateway = running.enter_context(_process([sys.executable, "-m", "gateway"], env, data_dir / "gateway.log"))
        trainer = running.enter_context(_process([sys.executable, "-m", "trainer"], env, data_dir / "trainer.log"))
        url = f"http://127.0.0.1:{port}"
        _wait_ready(url, [gateway, trainer], data_dir)
        yield Stack(url=url, key=key, data_dir=data_dir, base_model=engine.name, gateway=gateway, trainer=trainer)


def _run(command: Sequence[str], env: dict[str, str]) -> str:
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@contextmanager
def _process(command: Sequence[str], env: dict[str, str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    with log.open("wb") as output:
        child = _spawn(command, env, output)
        try:
            yield child
        finally:
            end_group(child)


def _spawn(command: Sequence[str], env: dict[str, str], output: IO[bytes]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


def end_group(child: "subprocess.Popen[bytes]", *, grace_s: float = 20.0) -> None:
    """End a child's whole process group: SIGTERM, then SIGKILL for what is left."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, signum)
        except ProcessLookupError:
            break
        try:
            child.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            continue


def _wait_ready(url: str, processes: Sequence["subprocess.Popen[bytes]"], data_dir: Path) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    answer = "no answer"
    while time.monotonic() < deadline:
        for process in processes:
            assert process.poll() is None, _logs(data_dir)
        try:
            response = httpx.get(f"{url}/readyz", timeout=5)
        except httpx.TransportError:
            pass
        else:
            if response.status_code == 200:
                return
            answer = response.text
        time.sleep(0.1)
    raise AssertionError(f"not ready after {READY_TIMEOUT_S:g} s: {answer}\n{_logs(data_dir)}")


def _logs(data_dir: Path) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text()[-4000:]}" for log in sorted(data_dir.glob("*.log")))
