"""The engines of a test session, each started at most once and only when a test asks for it.

A conftest takes them with ``from tests.engines.fixtures import *`` or by name. vLLM needs about 40 s to start; its
worker processes outlive the server's SIGTERM, so the whole process group is ended.
"""

import asyncio
import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from gateway.core.catalog import BaseModel
from gateway.engines.launch import EngineSpec, Launch, launch_scripted, launch_vllm
from tests.stack import EngineEndpoint, end_group, free_port

START_TIMEOUT_S = 480.0  # 40 on an idle machine
SCRIPTED_CONTEXT = 512


class EngineProcess:
    """One engine process that a test may kill and start again on its port."""

    def __init__(self, launch: Launch, url: str, log: Path) -> None:
        self.url = url
        self._launch = launch
        self._log = log
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start and wait until it answers."""
        with self._log.open("ab") as output:
            self._child = subprocess.Popen(
                self._launch.command,
                env={**os.environ, **self._launch.environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _healthy(self.url):
            assert self._child.poll() is None, self._log.read_text()[-6000:]
            assert time.monotonic() < deadline, self._log.read_text()[-6000:]
            time.sleep(0.05)

    @property
    def pid(self) -> int:
        """The process, which leads the group of all its children."""
        assert self._child is not None
        return self._child.pid

    def kill(self) -> None:
        """SIGKILL the process and all its children."""
        assert self._child is not None
        os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        self._child = None

    def stop(self) -> None:
        """End the process and all its children."""
        if self._child is not None:
            end_group(self._child)
            self._child = None


async def until(condition: Callable[[], Awaitable[bool]], *, timeout_s: float = 15.0) -> None:
    """Return as soon as ``condition`` holds; for facts of another process, which can only be asked for.

    Raises:
        TimeoutError: it did not hold in time.
    """
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.01)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def running_engine(launch: Launch, url: str, log: Path) -> Iterator[EngineProcess]:
    """Start an engine, yield it, end it."""
    engine = EngineProcess(launch, url, log)
    try:
        engine.start()
        yield engine
    finally:
        engine.stop()


def endpoint_of(spec: EngineSpec, *, vocab_size: int) -> EngineEndpoint:
    return EngineEndpoint(
        name=spec.served_name,
        url=spec.url,
        key=spec.key,
        model_path=spec.model_path,
        dtype=spec.dtype,
        vocab_size=vocab_size,
        context_length=spec.max_model_len,
        max_lora_rank=spec.max_lora_rank,
        max_loras=spec.max_loras,
        tool_parser=spec.tool_parser,
    )


def base_model_of(*endpoints: EngineEndpoint, max_loras: int | None = None) -> BaseModel:
    """Return the catalogue's entry of one base model served by ``endpoints``."""
    first = endpoints[0]
    return BaseModel(
        name=first.name,
        path=first.model_path,
        dtype=first.dtype,
        vocab_size=first.vocab_size,
        context_length=first.context_length,
        max_lora_rank=first.max_lora_rank,
        max_loras=max_loras or first.max_loras,
        engines=tuple(endpoint.url for endpoint in endpoints),
    )


def scripted_spec(*, served_name: str = "scripted", key: str | None = None) -> EngineSpec:
    return EngineSpec(
        model_path=Path("/nonexistent"),
        served_name=served_name,
        port=free_port(),
        key=secrets.token_hex(8) if key is None else key,
        dtype="float32",
        max_loras=3,
        max_model_len=SCRIPTED_CONTEXT,
    )


def vocab_size_of(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


@pytest.fixture(scope="session")
def scripted_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineEndpoint]:
    """A scripted engine: ready in half a second."""
    with running_scripted_engine(tmp_path_factory.mktemp("scripted-engine")) as endpoint:
        yield endpoint


@contextmanager
def running_scripted_engine(directory: Path) -> Iterator[EngineEndpoint]:
    spec = scripted_spec()
    with running_engine(launch_scripted(spec), spec.url, directory / "engine.log"):
        yield endpoint_of(spec, vocab_size=256)


@pytest.fixture(scope="session")
def tiny_process(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EngineProcess, EngineEndpoint]]:
    """vLLM with the tiny float32 model; who stops it starts it again."""
    spec = tiny_spec(tiny_model)
    log = tmp_path_factory.mktemp("tiny-engine") / "engine.log"
    with running_engine(launch_vllm(spec), spec.url, log) as process:
        yield process, endpoint_of(spec, vocab_size=vocab_size_of(tiny_model))


@pytest.fixture(scope="session")
def tiny_engine(tiny_process: tuple[EngineProcess, EngineEndpoint]) -> EngineEndpoint:
    """vLLM with the tiny float32 model."""
    return tiny_process[1]


@pytest.fixture(scope="session")
def smollm_engine(smollm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineEndpoint]:
    """vLLM with SmolLM2-135M-Instruct in bfloat16."""
    spec = smollm_spec(smollm_model)
    log = tmp_path_factory.mktemp("smollm-engine") / "engine.log"
    with running_engine(launch_vllm(spec), spec.url, log):
        yield endpoint_of(spec, vocab_size=vocab_size_of(smollm_model))


def smollm_spec(model: Path) -> EngineSpec:
    return EngineSpec(
        model_path=model,
        served_name="smollm2-135m-instruct",
        port=free_port(),
        key=secrets.token_hex(16),
        max_lora_rank=8,
        max_loras=3,
        threads=all_cores(),
    )


def tiny_spec(model: Path) -> EngineSpec:
    return EngineSpec(
        model_path=model,
        served_name="tiny",
        port=free_port(),
        key=secrets.token_hex(16),
        dtype="float32",
        max_loras=3,
        max_lora_rank=8,
        max_model_len=1024,
        kv_gib=1,
        threads=all_cores(),
        tool_parser="hermes",
    )


def all_cores() -> str:
    """The cores this process may use, as vLLM's list."""
    return ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))


__all__ = ["scripted_engine", "smollm_engine", "tiny_engine", "tiny_process"]
