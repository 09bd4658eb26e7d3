"""Doing to a running stack what the plan says, at the moment it says."""

import asyncio
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from sqlalchemy.exc import SQLAlchemyError

from tests.crash.driver import Driver
from tests.crash.oracles.sql import connected, rows
from tests.crash.plan import Fault, Strike
from tests.crash.processes import Stack

INJECTED_S = 0.6
FULL_S = 1.5
IN_USE = 20  # times a strike's delay, up to 2 s: what waited for the engine loads and samples meanwhile
_RUNNING = "SELECT id FROM operations WHERE status = 'running' AND NOT staged"
_WRITES = "pwrite64,write,ftruncate,fallocate"
_GATEWAY_ERRORS = frozenset({Fault.FSYNC_ERROR_GATEWAY, Fault.WRITE_ERROR_GATEWAY, Fault.NO_SPACE_GATEWAY})
_TRAINER_FAULTS = frozenset({Fault.KILL_TRAINER, Fault.KILL_ALL})


class Striker:
    """Strikes a stack. ``struck`` counts what was done."""

    def __init__(self, stack: Stack, driver: Driver) -> None:
        self.struck: Counter[Fault] = Counter()
        self.statuses: list[tuple[Fault, int | None]] = []
        self._stack = stack
        self._driver = driver
        self._victims: set[str] = set()

    async def run(self, strikes: Sequence[Strike]) -> None:
        """Strike each one when it is due."""
        for strike in strikes:
            while self._driver.final < strike.after:
                await asyncio.sleep(0.005)
            if strike.fault in _TRAINER_FAULTS:
                await self._recovered()
            if strike.fault is Fault.KILL_ENGINE:
                await self._engine_in_use()
            await asyncio.sleep(strike.delay_s * (IN_USE if strike.fault is Fault.KILL_ENGINE else 1))
            await self._stack.until_running(*self._aimed_at(strike.fault))
            self._driver.note(strike.fault.value, "strikes")
            await self._strike(strike.fault)
            self._driver.note(strike.fault.value, "struck")
            self.struck[strike.fault] += 1
        self._driver.calm.set()

    async def _engine_in_use(self) -> None:
        """Return when the engine serves. Most operations take no engine: those to come wait until it is there, too."""
        self._driver.going.clear()
        try:
            await self._stack.until_engine_serves()
        finally:
            self._driver.going.set()

    def _aimed_at(self, fault: Fault) -> Sequence[str]:
        match fault:
            case Fault.KILL_ALL:
                return list(self._stack.members)
            case Fault.KILL_TRAINER:
                return self._stack.names("trainer")
            case Fault.KILL_ENGINE:
                return ["engine"]
            case Fault.RESTART_DATABASE | Fault.FULL_DISK:
                return []
            case Fault.KILL_GATEWAY | Fault.TERM_GATEWAY:
                return ["gateway"]
            case _:
                return ["gateway" if fault in _GATEWAY_ERRORS else "trainer-0"]

    async def _strike(self, fault: Fault) -> None:
        stack, aimed_at = self._stack, self._aimed_at(fault)
        match fault:
            case Fault.KILL_TRAINER | Fault.KILL_GATEWAY | Fault.KILL_ENGINE | Fault.KILL_ALL:
                stack.kill(*aimed_at)
                if fault is Fault.KILL_ALL:
                    await asyncio.to_thread(stack.restart_database)
                if fault in _TRAINER_FAULTS:
                    self._victims = await self._running()
            case Fault.TERM_TRAINER | Fault.TERM_GATEWAY:
                self.statuses.append((fault, await asyncio.to_thread(stack.terminate, *aimed_at)))
            case Fault.RESTART_DATABASE:
                await asyncio.to_thread(stack.restart_database)
            case Fault.FSYNC_ERROR_GATEWAY | Fault.FSYNC_ERROR_TRAINER:
                await self._inject(fault, "fsync,fdatasync", "EIO", only=None)
            case Fault.WRITE_ERROR_GATEWAY | Fault.WRITE_ERROR_TRAINER:
                await self._inject(fault, _WRITES, "EIO", only="loopline.db")
            case Fault.NO_SPACE_GATEWAY | Fault.NO_SPACE_TRAINER:
                await self._inject(fault, _WRITES, "ENOSPC", only="loopline.db")
            case Fault.FULL_DISK:
                await self._fill()

    async def _inject(self, fault: Fault, calls: str, errno: str, *, only: str | None) -> None:
        """Make system calls of a running process fail for a moment."""
        (name,) = self._aimed_at(fault)
        command = ["strace", "-f", "-qq", "-o", os.devnull, "-p", str(self._stack.members[name].pid)]
        if only is not None:
            database = self._stack.data_dir / only
            for suffix in ("", "-wal", "-shm", "-journal"):
                command += ["-P", f"{database}{suffix}"]
        command += ["-e", f"trace={calls}", "-e", f"inject={calls}:error={errno}"]
        tracer = await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL)
        await asyncio.sleep(INJECTED_S)
        with suppress(ProcessLookupError):
            tracer.send_signal(signal.SIGINT)
        await tracer.wait()

    async def _fill(self) -> None:
        """Leave no byte in the data directory's file system for a moment."""
        filler = self._stack.data_dir / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(64 * 1024))
        await asyncio.sleep(FULL_S)
        filler.unlink()

    async def _recovered(self) -> None:
        """Return when what the last kill interrupted is done: an operation hit twice is given up, by contract."""
        while self._victims & await self._running():
            await asyncio.sleep(0.02)

    async def _running(self) -> set[str]:
        while True:
            with suppress(SQLAlchemyError):
                return await asyncio.to_thread(_running_ids, self._stack.database_url)
            await asyncio.sleep(0.05)


def _running_ids(url: str) -> set[str]:
    with connected(url) as connection:
        return {row["id"] for row in rows(connection, _RUNNING)}
