"""What the gateway does without being asked: expire sessions and versions, give up on sequence gaps that never fill and
on the samples of gateways that died, forget old scores, and remove the files of versions that were deleted long enough
ago.

Any number of gateways may do all of it at once: each step is one statement, or may be repeated without harm. What a
client (with a missing operation, or by using its session) or another gateway (by renewing its lease) can prevent
happens only after the time for it passed without a break: not while the database or this gateway was away, nor at once
when they are back.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import structlog

from gateway.core.clock import Clock
from gateway.core.ids import OperationId, SampleId, SessionId, VersionId
from gateway.core.ports import Artifacts, Database, Engines, UnitOfWork
from gateway.core.versions import Version
from gateway.wire.sampling_jobs import LEASE_S

INTERVAL_S = 1.0
LEASE = timedelta(seconds=LEASE_S)
LOST_KEPT = timedelta(days=1)
PURGED_AT_ONCE = 16
BREAK = timedelta(seconds=5)  # without a sweep that succeeded: the database was away, or the machine slept
RETURN = timedelta(seconds=60)  # for clients that kept a session in use until the break; none lives shorter
USED_FOR = timedelta(seconds=10)  # that a gateway works with a deleted version is said anew at every turn


@dataclass(frozen=True, slots=True, kw_only=True)
class _Swept:
    """What one sweep came upon."""

    expired: Sequence[SessionId]
    ended: Sequence[VersionId]
    failed: Sequence[OperationId]
    lost: Sequence[SampleId]


class Sweeper:
    """Runs the sweeps. A sweep that fails is logged and tried again at the next turn."""

    def __init__(
        self,
        database: Database,
        engines: Engines,
        artifacts: Artifacts,
        clock: Clock,
        *,
        gap_timeout_s: float,
        undelete_s: float,
    ) -> None:
        self._database = database
        self._engines = engines
        self._artifacts = artifacts
        self._clock = clock
        self._gap_timeout = timedelta(seconds=gap_timeout_s)
        self._undelete = timedelta(seconds=undelete_s)
        self._reachable_since = self._swept_at = clock.now()
        self._renewable_since = datetime.min.replace(tzinfo=UTC)  # other gateways did without this one
        self._log = structlog.stdlib.get_logger("gateway.background")

    async def run(self) -> None:
        """Sweep and purge every second until cancelled."""
        await asyncio.gather(self._repeated(self.sweep), self._repeated(self.purge))

    async def _repeated(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except Exception:
                self._log.exception("sweep failed; it is tried again")
            await asyncio.sleep(INTERVAL_S)

    async def sweep(self) -> None:
        """Expire what is due, fail what has waited too long for a missing seq, give up the samples of gateways that
        died; delete scores and lost samples after their day."""
        now = self._clock.now()
        if now - self._swept_at > BREAK:
            self._reachable_since = self._renewable_since = now
        reachable, renewable = now - self._reachable_since, now - self._renewable_since

        async def work(unit: UnitOfWork) -> _Swept:
            gap = self._gap_timeout
            swept = _Swept(
                expired=await unit.sessions.expire_due(now) if reachable >= RETURN else (),
                ended=await unit.upkeep.expire_due(now),
                failed=await unit.operations.fail_gaps(older_than=now - gap) if reachable >= gap else (),
                lost=await unit.samples.lose(expired_by=now) if renewable >= LEASE else (),
            )
            await unit.scores.forget(now)
            await unit.samples.forget_lost(older_than=now - LOST_KEPT)
            return swept

        swept = await self._database.apply(work)
        self._swept_at = now
        for session_id in swept.expired:
            self._log.info("session expired", session_id=session_id)
        for version_id in swept.ended:
            self._log.info("version expired", version_id=version_id)
        for operation_id in swept.failed:
            self._log.warning("operation failed: an earlier seq never came", operation_id=operation_id)
        for sample_id in swept.lost:
            self._log.warning("sample lost: its gateway is gone", sample_id=sample_id)

    async def purge(self) -> None:
        """Remove the files of versions that can no longer be brought back, once no engine can read them again."""
        now = self._clock.now()
        due = await self._database.ask(
            lambda unit: unit.upkeep.deleted_before(now - self._undelete, limit=PURGED_AT_ONCE)
        )
        used = [version.id for version in due if self._engines.in_use(version)]
        if used:
            async with self._database.write() as unit:
                await unit.upkeep.used(used, until=now + USED_FOR)
        for version in due:
            if version.id not in used and await self._engines.release(version) and not await self._used(version):
                await asyncio.to_thread(self._artifacts.remove, version.location)
                async with self._database.write() as unit:
                    await unit.upkeep.purged(version.id, at=now)
                self._log.info("version purged", version_id=version.id)

    async def _used(self, version: Version) -> bool:
        """Ask whether another gateway, which had the seconds that a release takes to say so, or a load needs it."""
        async with self._database.read() as unit:
            return await unit.upkeep.is_used(version.id, at=self._clock.now())
