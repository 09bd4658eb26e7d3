"""Moments as the tables hold them: whole microseconds since 1970 in UTC."""

from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)

HOUR = 3_600_000_000  # microseconds
DAY = 24 * HOUR


def micros(moment: datetime) -> int:
    """Return microseconds since 1970; the moment has a time zone."""
    return (moment - _EPOCH) // _MICROSECOND


def moment(at: int) -> datetime:
    return _EPOCH + at * _MICROSECOND


def month_of(at: int) -> str:
    """Return the UTC month that ``at`` lies in: ``2026-01``."""
    return f"{moment(at):%Y-%m}"


def month_range(month: str) -> tuple[int, int]:
    """Return the first microsecond of a month and that of the next one.

    Raises:
        ValueError: not of the form ``2026-01``.
    """
    year, _, number = month.partition("-")
    if len(year) != 4 or len(number) != 2:
        raise ValueError(f"a month is written 2026-01, not {month[:20]!r}")
    first = datetime(int(year), int(number), 1, tzinfo=UTC)
    following = datetime(first.year + first.month // 12, first.month % 12 + 1, 1, tzinfo=UTC)
    return micros(first), micros(following)
