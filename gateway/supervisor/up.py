"""`loopline up`: prepare everything, run it, talk to the person at the terminal, and leave nothing behind."""

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import Generator
from pathlib import Path

import httpx
from rich.console import Console
from rich.markup import escape

import migrations
from gateway.auth.keys import Keyring, local_key
from gateway.auth.master import open_keyring
from gateway.core.clock import SystemClock
from gateway.settings import Settings
from gateway.store.database import open_database
from gateway.supervisor import terminal
from gateway.supervisor.children import Child, ChildGaveUp, ChildSpec, RestartPolicy
from gateway.supervisor.logfiles import tail
from gateway.supervisor.machine import inspect_machine
from gateway.supervisor.models import read_facts, render_catalog
from gateway.supervisor.nightly import reconcile_nightly
from gateway.supervisor.options import EngineKind, UpOptions
from gateway.supervisor.plan import (
    Plan,
    PreparedModel,
    Process,
    child_environment,
    choose_device,
    make_plan,
    reachable_host,
)
from gateway.supervisor.ports import free_loopback_ports, require_free
from gateway.supervisor.preparation import parse_model, prepare, prepare_scripted
from gateway.supervisor.probes import answers
from gateway.supervisor.records import Address, RunDir, sweep
from gateway.supervisor.supervisor import Supervisor

_SWEEP_GRACE_S = 5.0


class StopSwitch:
    """What SIGINT, SIGTERM and SIGHUP do: cancel what is being prepared, or stop the supervisor once there is one."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._supervisor: Supervisor | None = None
        self._task = asyncio.current_task()
        self.pressed = False

    @contextlib.contextmanager
    def connected(self) -> Generator[None]:
        """Listen to the signals."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._press)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def control(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def _press(self) -> None:
        if self._supervisor is not None:
            self._console.print("Stopping at once." if self.pressed else "Stopping; press Ctrl-C again to hurry.")
            self._supervisor.stop()
        elif self._task is not None:
            self._task.cancel()
        self.pressed = True


async def up(options: UpOptions, *, console: Console, policy: RestartPolicy | None = None) -> int:
    """Run until a signal asks for the end; return the exit status: 0 after a clean stop, 1 when a child gave up.

    Raises:
        AlreadyRunning, PortTaken, ModelProblem, MasterKeyError, UnfitDatabase, Unavailable, ValueError: nothing was
            started; the message says what to do.
    """
    options.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    run_dir = RunDir(options.data_dir)
    switch = StopSwitch(console)
    with run_dir.lock(), switch.connected():
        try:
            for orphan in await sweep(run_dir, grace_s=_SWEEP_GRACE_S):
                console.print(f"Ended {orphan.name} (process {orphan.pid}), left behind by a run that was killed.")
            require_free(options.host, options.port)
            settings = Settings(data_dir=options.data_dir, host=options.host, port=options.port)
            plan = await _prepare(options, settings, run_dir, console)
            key = await _prepare_database(settings)
        except asyncio.CancelledError:
            if not switch.pressed:
                raise
            console.print("Stopped before anything was started.")
            return 0
        async with httpx.AsyncClient(trust_env=False) as client:
            return await _run(options, plan, key, run_dir, client, console, switch, policy)


async def _prepare(options: UpOptions, settings: Settings, run_dir: RunDir, console: Console) -> Plan:
    """Make the base models loadable, plan the processes and write the catalogue."""
    machine = inspect_machine()
    choose_device(options.device, machine)  # refuse before minutes of preparation
    arguments = [parse_model(argument) for argument in options.models]
    ports = free_loopback_ports(len(arguments))
    prepared: list[PreparedModel] = []
    for argument, port in zip(arguments, ports, strict=True):
        if options.engine is EngineKind.SCRIPTED:
            path = prepare_scripted(argument, models_dir=settings.model_dir)
        else:
            with console.status(f"Preparing {escape(argument.source)}"):
                path = await prepare(
                    argument.source,
                    models_dir=settings.model_dir,
                    run_dir=run_dir,
                    say=lambda line: console.print(escape(line), soft_wrap=True),
                )
        prepared.append(PreparedModel(name=argument.name, path=path, facts=read_facts(path), engine_port=port))
    catalog = options.data_dir / "run" / "catalog.toml"
    plan = make_plan(options, prepared, machine, engine_key=secrets.token_urlsafe(32), catalog=catalog)
    catalog.write_text(render_catalog(plan.models))
    return plan


async def _prepare_database(settings: Settings) -> str | None:
    """Bring the database up to date; return the local key, or None when it was revoked."""
    url = settings.resolved_database_url
    await asyncio.to_thread(migrations.upgrade, url)
    keyring: Keyring = open_keyring(settings)
    async with (
        open_database(
            url, blob_dir=settings.blob_dir, allow_weak_durability=settings.allow_weak_durability
        ) as database,
        database.write() as unit,
    ):
        return await local_key(unit, keyring, at=SystemClock().now())


async def _run(
    options: UpOptions,
    plan: Plan,
    key: str | None,
    run_dir: RunDir,
    client: httpx.AsyncClient,
    console: Console,
    switch: StopSwitch,
    policy: RestartPolicy | None,
) -> int:
    log_dir = options.data_dir / "logs"
    specs = [_spec(process, log_dir, client) for process in plan.processes]
    changes: list[terminal.Terminal] = []

    def on_change(child: Child) -> None:
        for screen in changes:
            screen.changed(child)

    supervisor = Supervisor(specs, run_dir=run_dir, policy=policy, on_change=on_change)
    screen = terminal.Terminal(console, supervisor.children)
    changes.append(screen)
    switch.control(supervisor)
    url = f"http://{reachable_host(options.host)}:{options.port}"
    nightly: asyncio.Task[None] | None = None
    running = asyncio.create_task(supervisor.run())
    ready = asyncio.create_task(supervisor.ready())
    screen.show()
    try:
        await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
        screen.hide()
        if not running.done() and not switch.pressed:
            run_dir.write_address(Address(url=url, pid=os.getpid()))
            _announce(options, plan, console, url=url, key=key, log_dir=log_dir)
            nightly = asyncio.create_task(_reconcile_nightly(options, plan, console, log_dir))
        await running
    except ChildGaveUp as error:
        screen.hide()
        terminal.show_failure(console, str(error), error.spec.log, tail(error.spec.log))
        return 1
    finally:
        screen.hide()
        ready.cancel()
        if nightly is not None:
            nightly.cancel()
            await asyncio.wait({nightly})
        run_dir.remove_address()
    console.print("Stopped; no process is left.")
    return 0


async def _reconcile_nightly(options: UpOptions, plan: Plan, console: Console, log_dir: Path) -> None:
    url = Settings(data_dir=options.data_dir).resolved_database_url
    engines = [engine for model in plan.models for engine in model.engines]
    await reconcile_nightly(url, engines, log_dir / "reconcile.log", lambda line: console.print(escape(line)))


def _announce(options: UpOptions, plan: Plan, console: Console, *, url: str, key: str | None, log_dir: Path) -> None:
    if key is None:
        console.print(f"Loopline is ready at {url}. The local key was revoked; make one: loopline keys create NAME")
        return
    beyond = options.host not in ("127.0.0.1", "::1", "localhost")
    terminal.show_ready(console, url=url, key=key, model=plan.models[0].name, log_dir=log_dir, shared=beyond)


def _spec(process: Process, log_dir: Path, client: httpx.AsyncClient) -> ChildSpec:
    headers = {"Authorization": f"Bearer {process.probe_key}"} if process.probe_key is not None else None
    return ChildSpec(
        name=process.name,
        command=process.command,
        environment=child_environment(os.environ, process),
        log=log_dir / f"{process.name}.log",
        probe=answers(client, process.probe_url, headers),
        stop_grace_s=process.stop_grace_s,
    )
