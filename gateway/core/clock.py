"""Time as a port, so that tests own it."""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """Wall time for records."""

    def now(self) -> datetime:
        """Return the current time, timezone-aware, in UTC."""
        ...


class SystemClock:
    """The machine's clock without its jumps: leases, expiry and prices must not feel that somebody set it.

    It runs with the monotonic clock and follows the wall clock at most ``MAX_SLEW`` faster or slower than that: a jump
    of an hour is caught up in about a week. It never goes back.
    """

    MAX_SLEW = 0.005

    def __init__(
        self,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
        monotonic: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),  # goes on in standby
    ) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._ahead = timedelta(0)  # of the database's clock before the machine's
        self._time, self._at = wall(), monotonic()

    def set(self, now: datetime) -> None:
        """Run with a clock that shows ``now``: the database's, which all processes share. For the start only."""
        self._ahead = now - self._wall()
        self._time, self._at = now, self._monotonic()

    def now(self) -> datetime:
        at = self._monotonic()
        passed = at - self._at
        expected = self._time + timedelta(seconds=passed)
        most = timedelta(seconds=self.MAX_SLEW * passed)
        offset = self._wall() + self._ahead - expected
        self._time, self._at = expected + max(-most, min(most, offset)), at
        return self._time
