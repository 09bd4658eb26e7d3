"""The stack under test: database, engine, trainers and gateway as processes, killed and started again by name.

It stands in for the supervisor: whatever died is started again after ``RESTART_S``. A process that ended without
being told to is remembered: no fault may kill what it was not aimed at.
"""

import asyncio
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psycopg

import migrations
from gateway.auth.keys import mint
from gateway.auth.master import open_keyring
from gateway.core.clock import SystemClock
from gateway.core.principals import ALL_SCOPES
from gateway.engines.launch import EngineSpec, launch_vllm
from gateway.settings import Settings
from gateway.store import open_database
from gateway.supervisor import groups
from tests.crash import straced
from tests.crash.launchers import ColdLauncher, Launcher, WarmLauncher, gone, wait_gone
from tests.postgres import PostgresServer, find_binaries, start_postgres, stop_postgres
from tests.stack import free_port

RESTART_S = 0.1
READY_S = 240.0
VLLM_READY_S = 1200.0  # on a machine that has much else to do
_WATCH_S = 0.5
MODEL = "tiny"
_ENGINE_KEY = "crash"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What to run. ``warm`` forks from a warm parent; ``vllm`` takes the real engine; ``trainers`` share one model."""

    directory: Path
    database: str
    model: Path
    vocab_size: int
    name: str = MODEL
    context_length: int = 1024
    dtype: str = "float32"
    warm: bool = True
    vllm: bool = False
    trainers: int = 1
    trainer_program: str = "trainer"
    disk: Path | None = None  # a small file system for the data directory
    traced: bool = False  # gateway and database under strace, see ``straced``
    failing: str = ""  # which syncs of a traced gateway fail
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(slots=True, kw_only=True)
class Member:
    """One process of the stack. ``ended`` are the exit statuses of its deaths that nobody ordered."""

    name: str
    start: Callable[[], int]
    pid: int = 0
    wanted: bool = True
    ended: list[int] = field(default_factory=list[int])


class Stack:
    """A running stack. Use ``running``."""

    def __init__(self, setting: Setting, launcher: Launcher, cold: ColdLauncher) -> None:
        self.setting = setting
        self.directory = setting.directory
        self.data_dir = (setting.disk or setting.directory) / "data"
        self.port, self.engine_port = free_port(), free_port()
        self.postgres: PostgresServer | None = None
        self.postgres_dir: Path | None = None  # of its own: the server runs as another user
        self.key = ""
        self.members: dict[str, Member] = {}
        self.orphans: list[str] = []
        self.engine_away_at = 0.0  # when (monotonic) the engine was last seen starting
        self._launcher = launcher
        self._cold = cold
        self._environment: dict[str, str] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine_url(self) -> str:
        return f"http://127.0.0.1:{self.engine_port}"

    @property
    def database_url(self) -> str:
        if self.postgres is not None:
            return self.postgres.url("loopline")
        return f"sqlite:///{self.data_dir / 'loopline.db'}"

    @property
    def ready_s(self) -> float:
        """The longest a start may take."""
        return VLLM_READY_S if self.setting.vllm else READY_S

    @property
    def journal(self) -> Path:
        return self.directory / "engine.journal"

    def log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    async def prepare(self) -> None:
        """Make an empty database, a key and the catalogue."""
        self.data_dir.mkdir(parents=True)
        if self.setting.database == "postgres":
            self.start_database()
            assert self.postgres is not None
            with self.postgres.connect() as connection:
                connection.execute("CREATE DATABASE loopline")
        await asyncio.to_thread(migrations.upgrade, self.database_url)
        catalog = self.directory / "catalog.toml"
        catalog.write_text(self._catalog())
        settings = Settings(data_dir=self.data_dir)
        keyring = open_keyring(settings)
        async with open_database(self.database_url, blob_dir=settings.blob_dir) as database, database.write() as unit:
            project = await unit.keys.ensure_project("crash")
            _, self.key = await mint(
                unit, keyring, project_id=project, name="crash", scopes=ALL_SCOPES, at=SystemClock().now()
            )
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("LOOPLINE_")},
            "LOOPLINE_DATA_DIR": str(self.data_dir),
            "LOOPLINE_DATABASE_URL": self.database_url,
            "LOOPLINE_CATALOG": str(catalog),
            "LOOPLINE_PORT": str(self.port),
            "LOOPLINE_BASE_MODEL": self.setting.name,
            "LOOPLINE_ENGINE_KEY": _ENGINE_KEY,
            "LOOPLINE_THREADS": "1",
            "LOOPLINE_LEASE_S": "2",
            "LOOPLINE_HEARTBEAT_S": "0.3",
            "LOOPLINE_SNAPSHOT_AFTER_S": "0.2",
            "HF_HUB_OFFLINE": "1",
            **self.setting.environment,
        }

    def start_all(self) -> None:
        self._add("engine", self._start_engine)
        self._add("gateway", self._start_gateway)
        for index in range(self.setting.trainers):
            name = f"trainer-{index}"
            self._add(name, lambda name=name: self._start(self.setting.trainer_program, [], name))

    def start_database(self) -> None:
        binaries = find_binaries()
        assert binaries is not None, "PostgreSQL is not installed"
        self.postgres_dir = self.postgres_dir or Path(tempfile.mkdtemp(prefix="loopline-pg-"))
        if self.setting.traced:
            binaries = _traced_binaries(self.postgres_dir, binaries)
        self.postgres = start_postgres(self.postgres_dir, binaries)

    def restart_database(self) -> None:
        """An immediate restart: every connection is cut, nothing is flushed but the log."""
        if self.postgres is not None:
            stop_postgres(self.postgres)
            self.start_database()

    async def until_running(self, *names: str) -> None:
        """Return when each of these processes has been started: what is not there cannot be struck."""
        while not all(self.members[name].pid for name in names):
            await asyncio.sleep(0.01)

    def mend_database(self) -> None:
        """Return when the database answers; one that ended by itself is started again."""
        while self.postgres is not None:
            if self.postgres.process.poll() is not None:
                return self.start_database()
            with suppress(psycopg.OperationalError):
                return self.postgres.connect().close()
            time.sleep(0.02)

    def kill(self, *names: str) -> None:
        """SIGKILL these running processes and all their children at once."""
        for name in names:
            groups.signal_group(self.members[name].pid, signal.SIGKILL)
        for name in names:
            self._bury(self.members[name])

    def terminate(self, name: str, timeout_s: float = 60.0) -> int | None:
        """SIGTERM a process; return its exit status, None when it had to be killed."""
        member = self.members[name]
        member.wanted = False
        os.kill(member.pid, signal.SIGTERM)
        status = None
        if wait_gone(member.pid, timeout_s):
            status = self._launcher_of(name).reap(member.pid)
            groups.signal_group(member.pid, signal.SIGKILL)
            member.pid = 0
        else:
            self.kill(name)
        member.wanted = True
        return status

    def names(self, prefix: str) -> list[str]:
        return [name for name in self.members if name.startswith(prefix)]

    async def keep(self) -> None:
        """Start again whatever is dead, for ever."""
        while True:
            for member in self.members.values():
                if member.pid and gone(member.pid) and member.wanted:
                    member.ended.append(self._launcher_of(member.name).reap(member.pid))
                    groups.signal_group(member.pid, signal.SIGKILL)
                    member.pid = 0
                if not member.pid and member.wanted:
                    member.pid = member.start()
            await asyncio.sleep(RESTART_S)

    async def until_ready(self) -> None:
        """Return when gateway and engine answer."""
        await self.until_engine_serves()
        await self._until_answered(f"{self.url}/livez")

    async def until_engine_serves(self) -> None:
        await self._until_answered(f"{self.engine_url}/health")

    async def watch(self) -> None:
        """Note while the engine does not answer, for ever. One that needs more than ``ready_s`` is not starting."""
        began, pid = 0.0, 0
        async with httpx.AsyncClient(trust_env=False, timeout=10.0) as client:
            while True:
                now = time.monotonic()
                try:
                    away = (await client.get(f"{self.engine_url}/health")).status_code != 200
                except httpx.TransportError:
                    away = True
                if not away or pid != self.members["engine"].pid:
                    began, pid = now, self.members["engine"].pid
                if away and now - began < self.ready_s:
                    self.engine_away_at = now
                await asyncio.sleep(_WATCH_S)

    def stop(self) -> None:
        """Kill everything but the database."""
        for member in self.members.values():
            member.wanted = False
        self.kill(*[name for name, member in self.members.items() if member.pid])

    async def _until_answered(self, url: str) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=2.0) as client, asyncio.timeout(self.ready_s):
            while True:
                with suppress(httpx.TransportError):
                    if (await client.get(url)).status_code == 200:
                        return
                await asyncio.sleep(0.02)

    def _add(self, name: str, start: Callable[[], int]) -> None:
        self.members[name] = Member(name=name, start=start)
        self.members[name].pid = start()

    def _bury(self, member: Member) -> None:
        pid, member.pid = member.pid, 0
        if not pid:
            return
        self._launcher_of(member.name).reap(pid)
        for child in groups.members(pid):
            if not wait_gone(child.pid, 5.0):
                self.orphans.append(f"{member.name}: {child.pid}")

    def _launcher_of(self, name: str) -> Launcher:
        cold = (name == "engine" and self.setting.vllm) or (name == "gateway" and self.setting.traced)
        return self._cold if cold else self._launcher

    def _start(self, program: str, arguments: Sequence[str], name: str) -> int:
        return self._launcher.start(program, arguments, self._environment, self.log(name))

    def _start_gateway(self) -> int:
        if not self.setting.traced:
            return self._start("gateway", [], "gateway")
        tracer = straced.command(self.directory / "gateway.strace", failing=self.setting.failing)
        command = [*tracer, sys.executable, "-m", "gateway"]
        return self._cold.run(command, self._environment, self.log("gateway"))

    def _start_engine(self) -> int:
        if not self.setting.vllm:
            arguments = [
                *("--port", str(self.engine_port), "--served-name", self.setting.name),
                *("--vocab-size", str(self.setting.vocab_size), "--journal", str(self.journal)),
            ]
            return self._start("engine", arguments, "engine")
        launch = launch_vllm(
            EngineSpec(
                model_path=self.setting.model,
                served_name=self.setting.name,
                port=self.engine_port,
                key=_ENGINE_KEY,
                dtype=self.setting.dtype,
                max_loras=3,
                max_lora_rank=8,
                max_model_len=self.setting.context_length,
                kv_gib=1,
                threads=",".join(str(core) for core in sorted(os.sched_getaffinity(0))),
            )
        )
        return self._cold.run(launch.command, {**os.environ, **launch.environment}, self.log("engine"))

    def _catalog(self) -> str:
        return (
            f"[models.{self.setting.name}]\npath = {json.dumps(str(self.setting.model))}\n"
            f'dtype = "{self.setting.dtype}"\nvocab_size = {self.setting.vocab_size}\n'
            f"context_length = {self.setting.context_length}\nmax_lora_rank = 8\nmax_loras = 3\n"
            f'engines = ["{self.engine_url}"]\n'
        )


def _traced_binaries(directory: Path, binaries: Path) -> Path:
    """Make a directory in which ``postgres`` is the server under strace."""
    traced = directory / "bin"
    if not traced.exists():
        traced.mkdir()
        (traced / "initdb").symlink_to(binaries / "initdb")
        words = [*straced.command(directory / "postgres.strace"), str(binaries / "postgres")]
        (traced / "postgres").write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        (traced / "postgres").chmod(0o755)
    return traced


@asynccontextmanager
async def running(setting: Setting, launcher: Launcher | None = None) -> AsyncIterator[Stack]:
    """Start a stack on an empty directory and yield it ready; nothing of it is left afterwards.

    The directory stays, for the oracles; a PostgreSQL server is running until the end of the block.
    """
    if setting.directory.exists():
        shutil.rmtree(setting.directory)
    if setting.disk is not None:
        shutil.rmtree(setting.disk / "data", ignore_errors=True)
    setting.directory.mkdir(parents=True)
    cold = ColdLauncher()
    chosen = launcher or (WarmLauncher(setting.directory / "warm.log") if setting.warm else cold)
    stack = Stack(setting, chosen, cold)
    beside: list[asyncio.Task[None]] = []
    try:
        await stack.prepare()
        stack.start_all()
        beside = [asyncio.create_task(task, name=task.__name__) for task in (stack.keep(), stack.watch())]
        await stack.until_ready()
        yield stack
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        stack.stop()
        if stack.postgres is not None:
            stop_postgres(stack.postgres)
        if stack.postgres_dir is not None:
            shutil.rmtree(stack.postgres_dir, ignore_errors=True)
        if launcher is None:
            chosen.close()
        cold.close()
