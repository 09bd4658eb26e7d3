"""Doing to a running stack what the plan says, at the moment it says."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from sqlalchemy.exc import SQLAlchemyError

from tests.crash.driver import Driver
from tests.crash.injection import fail_calls, family
from tests.crash.oracles.sql import connected, rows
from tests.crash.plan import Fault, Strike
from tests.crash.processes import Stack

INJECTED_S = 0.6
FULL_S = 1.5
IN_USE = 20  # times a strike's delay, up to 2 s: what waited for the engine loads and samples meanwhile
_RUNNING = "SELECT id FROM operations WHERE status = 'running' AND NOT staged"
_SYNCS, _WRITES = "fsync,fdatasync", "pwrite64,pwritev,write,ftruncate,fallocate"
_GATEWAY_ERRORS = frozenset({Fault.FSYNC_ERROR_GATEWAY, Fault.WRITE_ERROR_GATEWAY, Fault.NO_SPACE_GATEWAY})
_DATABASE_FAULTS = frozenset({Fault.RESTART_DATABASE, Fault.FSYNC_ERROR_DATABASE, Fault.NO_SPACE_DATABASE})
_TRAINER_FAULTS = frozenset({Fault.KILL_TRAINER, Fault.KILL_ALL})


class Striker:
    """Strikes a stack. ``struck`` counts what was done, ``failed_calls`` the system calls that were made to fail."""

    def __init__(self, stack: Stack, driver: Driver) -> None:
        self.struck: Counter[Fault] = Counter()
        self.failed_calls: Counter[Fault] = Counter()
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
            case _ if fault in _DATABASE_FAULTS or fault is Fault.FULL_DISK:
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
                await self._inject(fault, _SYNCS, "EIO")
            case Fault.WRITE_ERROR_GATEWAY | Fault.WRITE_ERROR_TRAINER:
                await self._inject(fault, _WRITES, "EIO", only="loopline.db")
            case Fault.NO_SPACE_GATEWAY | Fault.NO_SPACE_TRAINER:
                await self._inject(fault, _WRITES, "ENOSPC", only="loopline.db")
            case Fault.FSYNC_ERROR_DATABASE:
                await self._inject(fault, _SYNCS, "EIO")
            case Fault.NO_SPACE_DATABASE:
                await self._inject(fault, _WRITES.replace("write,", ""), "ENOSPC")
            case Fault.FULL_DISK:
                await self._fill()

    async def _inject(self, fault: Fault, calls: str, errno: str, *, only: str | None = None) -> None:
        """Make system calls of a running process, or of the database's server, fail for a moment."""
        stack = self._stack
        if fault in _DATABASE_FAULTS:
            assert stack.postgres is not None
            pids = family(stack.postgres.process.pid)
        else:
            pids = [stack.members[name].pid for name in self._aimed_at(fault)]
        suffixes = () if only is None else ("", "-wal", "-shm", "-journal")
        self.failed_calls[fault] += await fail_calls(
            pids,
            calls,
            errno,
            seconds=INJECTED_S,
            trace=stack.directory / "injected.strace",
            only=[stack.data_dir / f"{only}{suffix}" for suffix in suffixes],
        )
        await asyncio.to_thread(stack.mend_database)

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
