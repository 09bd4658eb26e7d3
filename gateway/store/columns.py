"""Column types and constraints that every table shares."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from sqlalchemy import BigInteger, CheckConstraint, Dialect
from sqlalchemy.types import TypeDecorator

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class UtcMicros(TypeDecorator[datetime]):
    """A moment, stored as whole microseconds since 1970 in UTC: equal on every database and exact."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> int | None:
        return None if value is None else micros(value)

    def process_result_value(self, value: int | None, dialect: Dialect) -> datetime | None:
        return None if value is None else _EPOCH + value * _MICROSECOND


def micros(moment: datetime) -> int:
    """Return microseconds since 1970.

    Raises:
        ValueError: ``moment`` has no time zone.
    """
    if moment.tzinfo is None:
        raise ValueError(f"{moment} has no time zone")
    return (moment - _EPOCH) // _MICROSECOND


def one_of(column: str, words: type[StrEnum]) -> CheckConstraint:
    """The column holds one of the enum's words."""
    return CheckConstraint(f"{column} IN ({quoted(words)})", name=column)


def quoted(words: Iterable[StrEnum]) -> str:
    """Return the words as a list of SQL literals."""
    return ", ".join(f"'{word.value}'" for word in words)
