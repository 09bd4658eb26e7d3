"""The publisher: takes staged versions through the engines' gate and records what it found.

One gateway worker at a time holds the lock ``publisher``. A mismatch rejects the version and fails its operation with
both numbers; an engine that is away rejects nothing: the version waits and is tried again. No database unit is open
while an engine works, so a publisher that dies half-way leaves the version as it was.
"""

import asyncio
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import structlog

from gateway.core.clock import Clock
from gateway.core.errors import Conflict, GatewayError, Kind, Unavailable
from gateway.core.ids import VersionId
from gateway.core.ports import CorruptArtifact, Database, Engines, Wakeups
from gateway.core.results import Failure
from gateway.core.versions import CanaryReport, Version

LOCK = "publisher"
LEASE_S = 6.0
RENEW_S = 2.0
AT_ONCE = 256
FIRST_RETRY_S = 0.25
LAST_RETRY_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Retry:
    """When (monotonic seconds) a version is tried again, and how long the wait before was."""

    at: float
    delay_s: float


class Publisher:
    """Publishes while it is entered (async context manager)."""

    def __init__(self, database: Database, engines: Engines, wakeups: Wakeups, clock: Clock, owner: str) -> None:
        self._database = database
        self._engines = engines
        self._wakeups = wakeups
        self._clock = clock
        self._owner = owner
        self._log = structlog.stdlib.get_logger("gateway.publisher")
        self._retries: dict[VersionId, _Retry] = {}
        self._working: dict[VersionId, asyncio.Task[None]] = {}
        self._leading = False
        self._ask_at = 0.0  # monotonic seconds: until then the last answer about the lock counts
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self.run(), name="publisher")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._hold(0.0)  # the next holder need not wait for the lease to run out

    async def run(self) -> None:
        """Publish until cancelled. A slow engine delays the publications on it, not those on others."""
        seen = 0
        try:
            while True:
                try:
                    if await self._leads():
                        await self._start_due()
                except Exception:
                    # The edge of a background task: whatever broke (a database that is away), it must be tried again.
                    self._log.exception("publisher_failed")
                seen = await self._wakeups.wait(seen, self._pause_s(), patient=True)
        finally:
            for task in self._working.values():
                task.cancel()
            await asyncio.gather(*self._working.values(), return_exceptions=True)

    async def publish_waiting(self) -> float:
        """Take every due version through the gate once; return after how many seconds to look again."""
        await self._start_due()
        await asyncio.gather(*self._working.values())
        return self._pause_s()

    async def _start_due(self) -> None:
        async with self._database.read() as unit:
            waiting = await unit.versions.awaiting_publication(AT_ONCE)
        self._retries = {one.id: self._retries[one.id] for one in waiting if one.id in self._retries}
        now = time.monotonic()
        for version in waiting:
            retry = self._retries.get(version.id)
            if version.id not in self._working and (retry is None or retry.at <= now):
                task = asyncio.create_task(self._publish(version), name=f"publish-{version.id}")
                self._working[version.id] = task
                task.add_done_callback(lambda _, id=version.id: self._working.pop(id))

    def _pause_s(self) -> float:
        now = time.monotonic()
        delays = [retry.at - now for id, retry in self._retries.items() if id not in self._working]
        return max(0.0, min([RENEW_S, *delays]))

    async def _publish(self, version: Version) -> None:
        """Decide on one version. Nothing escapes: others are being published at the same time."""
        try:
            outcome = await self._judge(version)
            await self._record(version, outcome)
        except Unavailable as error:
            self._wait(version, error.code)
        except Conflict as error:
            # Another publisher, whose lease ran out while its engine worked, recorded its decision meanwhile.
            self._log.warning("publication_decided_elsewhere", version=version.id, code=error.code)
        except Exception:
            self._log.exception("publication_failed", version=version.id)
            self._wait(version, "internal_error")
        else:
            self._retries.pop(version.id, None)

    async def _judge(self, version: Version) -> CanaryReport | Failure:
        try:
            return await self._engines.publish(version)
        except CorruptArtifact as error:
            return Failure(kind=Kind.INTERNAL, code="corrupt_artifact", message=str(error))
        except Unavailable:
            raise
        except GatewayError as error:
            return Failure(kind=error.kind, code=error.code, message=error.message, details=error.details)

    async def _record(self, version: Version, outcome: CanaryReport | Failure) -> None:
        async with self._database.write() as unit:
            match outcome:
                case CanaryReport():
                    await unit.versions.publish(version.id, outcome, at=self._clock.now())
                case Failure():
                    await unit.versions.reject(version.id, outcome, at=self._clock.now())

    def _wait(self, version: Version, code: str) -> None:
        before = self._retries.get(version.id)
        delay_s = FIRST_RETRY_S if before is None else min(2 * before.delay_s, LAST_RETRY_S)
        self._retries[version.id] = _Retry(at=time.monotonic() + delay_s, delay_s=delay_s)
        self._log.warning("publication_waits", version=version.id, code=code, retry_in_s=delay_s)

    async def _leads(self) -> bool:
        """Take or extend the lock, at most once in ``RENEW_S``: wake-ups are many, and each asking is a write."""
        now = time.monotonic()
        if now >= self._ask_at:
            self._ask_at = now + RENEW_S
            self._leading = await self._hold(LEASE_S)
        return self._leading

    async def _hold(self, lease_s: float) -> bool:
        async with self._database.write() as unit:
            return await unit.locks.hold(LOCK, owner=self._owner, lease_s=lease_s, at=self._clock.now())
