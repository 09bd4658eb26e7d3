"""Time as a port, so that tests own it."""

from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Wall time for records."""

    def now(self) -> datetime:
        """Return the current time, timezone-aware, in UTC."""
        ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> datetime:
        return datetime.now(UTC)
