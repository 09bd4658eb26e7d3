"""Column types and constraints that every table shares."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from sqlalchemy import BigInteger, Boolean, CheckConstraint, Column, Dialect, Float, Index, Integer, text
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


def partial_index(name: str, *columns: str, where: str, unique: bool = False) -> Index:
    """An index of the rows that ``where``, a condition in SQL, holds for."""
    condition = text(where)
    return Index(name, *columns, unique=unique, sqlite_where=condition, postgresql_where=condition)


def lora_columns() -> tuple[Column[int] | Column[float] | Column[bool], ...]:
    """Return the columns of a ``LoraConfig``, as sessions and versions have them."""
    return (
        Column("lora_rank", Integer, nullable=False, comment="Rank of the A and B matrices"),
        Column("lora_alpha", Float, nullable=False, comment="alpha / rank is the scale"),
        Column("lora_train_attn", Boolean, nullable=False, comment="Attention projections train"),
        Column("lora_train_mlp", Boolean, nullable=False, comment="MLP projections train"),
        Column("lora_train_unembed", Boolean, nullable=False, comment="The unembedding trains"),
        Column("lora_seed", BigInteger, nullable=False, comment="Seed of the initial A matrices"),
    )
