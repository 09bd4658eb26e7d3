"""What the gateway does without being asked: expire sessions, give up on sequence gaps, forget old scores.

All are single statements that any number of gateways may run at once.
"""

import asyncio
from datetime import timedelta

import structlog

from gateway.core.clock import Clock
from gateway.core.ports import Database

INTERVAL_S = 1.0


class Sweeper:
    """Runs the sweeps. A sweep that fails is logged and tried again at the next turn."""

    def __init__(self, database: Database, clock: Clock, *, gap_timeout_s: float) -> None:
        self._database = database
        self._clock = clock
        self._gap_timeout = timedelta(seconds=gap_timeout_s)
        self._log = structlog.stdlib.get_logger("gateway.background")

    async def run(self) -> None:
        """Sweep every second until cancelled."""
        while True:
            try:
                await self.sweep()
            except Exception:
                self._log.exception("sweep failed; it is tried again")
            await asyncio.sleep(INTERVAL_S)

    async def sweep(self) -> None:
        """Expire what is due, fail what has waited too long for a missing seq, delete scores after their day."""
        now = self._clock.now()
        async with self._database.write() as unit:
            expired = await unit.sessions.expire_due(now)
            failed = await unit.operations.fail_gaps(older_than=now - self._gap_timeout)
            await unit.scores.forget(now)
        for session_id in expired:
            self._log.info("session expired", session_id=session_id)
        for operation_id in failed:
            self._log.warning("operation failed: an earlier seq never came", operation_id=operation_id)
