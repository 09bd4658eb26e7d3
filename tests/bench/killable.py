"""Gateways on one database that are killed and started again, for benches of the ledger."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import httpx
from sqlalchemy import text

import migrations
from billing.database import reading
from gateway.auth.keys import mint
from gateway.auth.master import open_keyring
from gateway.core.principals import ALL_SCOPES
from gateway.engines.launch import launch_scripted
from gateway.settings import Settings
from gateway.store import open_database
from tests.engines.fixtures import endpoint_of, running_engine, scripted_spec
from tests.postgres import find_binaries, start_postgres, stop_postgres
from tests.stack import EngineEndpoint, end_group, free_port

START_TIMEOUT_S = 90.0


@dataclass(kw_only=True)
class Killable:
    """One gateway process on a fixed port."""

    environment: dict[str, str]
    port: int = field(default_factory=free_port)
    log: Path
    module: str = "gateway"
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module],
                env={**self.environment, "LOOPLINE_PORT": str(self.port)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                if httpx.get(f"{self.url}/livez", timeout=2).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.05)
        raise RuntimeError(self.log.read_text()[-3000:])

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            end_group(self.process)


@dataclass(kw_only=True)
class Place:
    """A data directory, migrated, with a catalogue of one engine."""

    data_dir: Path
    endpoint: EngineEndpoint
    database_url: str | None = None

    def prepare(self) -> None:
        catalog = self.data_dir / "run" / "catalog.toml"
        catalog.parent.mkdir(parents=True)
        catalog.write_text(self.endpoint.catalog())
        migrations.upgrade(self.settings.resolved_database_url)

    @property
    def settings(self) -> Settings:
        return Settings(data_dir=self.data_dir, database_url=self.database_url)

    def gateway(self, name: str, *, module: str = "gateway") -> Killable:
        environment = {
            **os.environ,
            "LOOPLINE_DATA_DIR": str(self.data_dir),
            "LOOPLINE_ENGINE_KEY": self.endpoint.key,
        }
        if self.database_url is not None:
            environment["LOOPLINE_DATABASE_URL"] = self.database_url
        return Killable(environment=environment, log=self.data_dir / f"{name}.log", module=module)

    def new_keys(self, count: int) -> list[str]:
        """Mint keys of one project; return their texts."""

        async def mint_all() -> list[str]:
            keyring, settings = open_keyring(self.settings), self.settings
            async with (
                open_database(settings.resolved_database_url, blob_dir=settings.blob_dir) as database,
                database.write() as unit,
            ):
                project = await unit.keys.ensure_project("bench")
                now = datetime.now(UTC)
                minted = [
                    await mint(unit, keyring, project_id=project, name=f"k{n}", scopes=ALL_SCOPES, at=now)
                    for n in range(count)
                ]
            return [key for _, key in minted]

        return asyncio.run(mint_all())


def open_calls(url: str) -> int:
    """Return how many holds in the database at ``url`` a process is working for."""
    with reading(url) as connection:
        return connection.execute(text("SELECT count(*) FROM holds WHERE owner IS NOT NULL")).scalar_one()


def tokens_of(url: str, answer: str) -> dict[str, int]:
    """Return the facts of an OpenAI answer's id, as quantities by meter."""
    with reading(url) as connection:
        rows = connection.execute(
            text("SELECT meter, quantity FROM usage_facts WHERE source = :source"),
            {"source": answer.partition("-")[2]},
        )
        return {row.meter: row.quantity for row in rows}


@contextmanager
def scripted_place(database: str, *, token_delay_ms: float = 0.0) -> Iterator[Place]:
    """Yield a prepared place in a temporary directory, on ``sqlite`` or ``postgres``, with a scripted engine."""
    with ExitStack() as opened:
        directory = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="loopline-bench-")))
        database_url = None
        if database == "postgres":
            directory.chmod(0o755)
            binaries = find_binaries()
            assert binaries is not None, "no PostgreSQL server"
            (directory / "pg").mkdir()
            server = start_postgres(directory / "pg", binaries)
            opened.callback(stop_postgres, server)
            database_url = server.url(server.create())
        spec = scripted_spec()
        launch = launch_scripted(spec, token_delay_ms=token_delay_ms)
        opened.enter_context(running_engine(launch, spec.url, directory / "engine.log"))
        place = Place(
            data_dir=directory / "data", endpoint=endpoint_of(spec, vocab_size=256), database_url=database_url
        )
        place.prepare()
        yield place
