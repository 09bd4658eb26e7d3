"""A gateway process for wire tests: real SQLite, scripted engine, scripted trainer, keys of two projects."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import httpx

import migrations
from gateway.auth.keys import Keyring, mint
from gateway.auth.master import open_keyring
from gateway.core.ids import KeyId
from gateway.core.ports import UnitOfWork
from gateway.core.principals import ALL_SCOPES, Scope
from gateway.settings import Settings
from gateway.store import open_database
from tests.stack import EngineEndpoint, end_group, free_port

T = TypeVar("T")
UNTRAINED = "untrained"  # a base model in the catalogue that no trainer and no engine serves
START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Key texts by what they are."""

    owner: str
    stranger: str
    inference_only: str
    revoked: str
    expired: str
    unknown: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """A running gateway."""

    url: str
    settings: Settings
    keys: Keys
    log: Path
    process: "subprocess.Popen[bytes]"

    def client(self, key: str | None = None) -> httpx.Client:
        """Return a client of the native dialect."""
        return self._client("/training/v1", key)

    def openai_client(self, key: str | None = None) -> httpx.Client:
        return self._client("/v1", key)

    def _client(self, mount: str, key: str | None) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.keys.owner if key is None else key}"} if key != "" else {}
        return httpx.Client(base_url=f"{self.url}{mount}", headers=headers, timeout=60)

    def in_unit(self, work: Callable[[UnitOfWork], Awaitable[T]]) -> T:
        """Run ``work`` in a unit of its own, as another process would."""
        return asyncio.run(_in_unit(self.settings, work))


async def _in_unit(settings: Settings, work: Callable[[UnitOfWork], Awaitable[T]]) -> T:
    async with (
        open_database(settings.resolved_database_url, blob_dir=settings.blob_dir) as database,
        database.write() as unit,
    ):
        return await work(unit)


@contextmanager
def running_gateway(
    endpoint: EngineEndpoint,
    data_dir: Path,
    *,
    trainer: bool,
    catalog: str | None = None,
    env: dict[str, str] | None = None,
) -> Iterator[Gateway]:
    """Start a gateway (and a scripted trainer) on a fresh data directory; end both."""
    path = data_dir / "run" / "catalog.toml"
    path.parent.mkdir(parents=True)
    path.write_text(endpoint.catalog() + untrained_model(endpoint) if catalog is None else catalog)
    settings = Settings(data_dir=data_dir)
    migrations.upgrade(settings.resolved_database_url)
    keyring = open_keyring(settings)
    keys = asyncio.run(_in_unit(settings, lambda unit: _mint_all(unit, keyring)))
    environment, port = _environment(endpoint, data_dir, env)
    with ExitStack() as running:
        gateway, log = running.enter_context(_process(["-m", "gateway"], environment, data_dir / "gateway.log"))
        if trainer:
            running.enter_context(
                _process(["-m", "trainer", "--backend", "scripted"], environment, data_dir / "trainer.log")
            )
        started = Gateway(url=f"http://127.0.0.1:{port}", settings=settings, keys=keys, log=log, process=gateway)
        _wait_alive(started)
        yield started
    warned = [line for line in log.read_text().splitlines() if '"logger":"py.warnings"' in line]
    assert not warned, f"libraries warned the gateway {len(warned)} times, first: {warned[0]}"


@contextmanager
def joined_gateway(first: Gateway, endpoint: EngineEndpoint, *, env: dict[str, str] | None = None) -> Iterator[Gateway]:
    """Start another gateway on the database, files and engine of ``first``; end it."""
    environment, port = _environment(endpoint, first.settings.data_dir, env)
    with _process(["-m", "gateway"], environment, first.log.with_name(f"gateway-{port}.log")) as (process, log):
        started = replace(first, url=f"http://127.0.0.1:{port}", log=log, process=process)
        _wait_alive(started)
        yield started


def _environment(endpoint: EngineEndpoint, data_dir: Path, env: dict[str, str] | None) -> tuple[dict[str, str], int]:
    """Return a gateway's environment, and the port that it will listen on."""
    port = free_port()
    ours = {
        "LOOPLINE_DATA_DIR": str(data_dir),
        "LOOPLINE_ENGINE_KEY": endpoint.key,
        "LOOPLINE_PORT": str(port),
        "LOOPLINE_BASE_MODEL": endpoint.name,
    }
    return {**os.environ, **ours, **(env or {})}, port


def untrained_model(endpoint: EngineEndpoint) -> str:
    return (
        f'[models.{UNTRAINED}]\npath = "/nonexistent"\ndtype = "float32"\nvocab_size = {endpoint.vocab_size}\n'
        f"context_length = {endpoint.context_length}\nmax_lora_rank = 8\nmax_loras = 3\nengines = []\n"
    )


async def _mint_all(unit: UnitOfWork, keyring: Keyring) -> Keys:
    now = datetime.now(UTC)
    mine, theirs = await unit.keys.ensure_project("mine"), await unit.keys.ensure_project("theirs")

    async def new(project: Any, scopes: frozenset[Scope] = ALL_SCOPES, expires_at: datetime | None = None) -> str:
        _, text = await mint(
            unit, keyring, project_id=project, name="test", scopes=scopes, at=now, expires_at=expires_at
        )
        return text

    revoked = await new(mine)
    await unit.keys.revoke(KeyId(revoked.split("-")[1]), now)
    return Keys(
        owner=await new(mine),
        stranger=await new(theirs),
        inference_only=await new(mine, frozenset({Scope.INFERENCE})),
        revoked=revoked,
        expired=await new(mine, expires_at=now - timedelta(seconds=1)),
        unknown=keyring.text(KeyId("0" * 20)),
    )


@contextmanager
def _process(
    arguments: Sequence[str], env: dict[str, str], log: Path
) -> Iterator[tuple["subprocess.Popen[bytes]", Path]]:
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, *arguments], env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield child, log
        finally:
            end_group(child)


def _wait_alive(gateway: Gateway) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert gateway.process.poll() is None, gateway.log.read_text()
        try:
            if httpx.get(f"{gateway.url}/livez", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError(gateway.log.read_text())
