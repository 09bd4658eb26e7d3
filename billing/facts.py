"""Usage facts: what was consumed, read from the view ``usage_source_facts``. Whoever consumed it wrote them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, Connection, RowMapping, Select, Text, column, select, table, tuple_

from billing.tables import inbox

usage_source_facts = table(
    "usage_source_facts",
    *(column(name, Text) for name in ("project_id", "source", "meter", "base_model", "key_id")),
    *(column(name, Text) for name in ("session_id", "version_id", "tag", "engine")),
    *(column(name, BigInteger) for name in ("quantity", "at")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """``quantity`` units of ``meter``, consumed once by ``source``. ``at`` is in microseconds and decides the price."""

    project_id: str
    source: str
    meter: str
    quantity: int
    base_model: str
    key_id: str
    session_id: str | None
    version_id: str | None
    tag: str | None
    at: int

    @property
    def key(self) -> tuple[str, str, str]:
        """What a fact is unique by."""
        return self.project_id, self.source, self.meter


_NAMES = tuple(Fact.__dataclass_fields__)


def columns() -> list[Any]:
    return [usage_source_facts.c[name] for name in _NAMES]


def fact_of(row: RowMapping) -> Fact:
    return Fact(**{name: row[name] for name in _NAMES})


def unposted() -> Select[*tuple[Any, ...]]:
    """Select the facts that wait in the inbox."""
    facts = usage_source_facts
    return select(*columns()).join_from(
        facts,
        inbox,
        (facts.c.project_id == inbox.c.project_id)
        & (facts.c.source == inbox.c.source)
        & (facts.c.meter == inbox.c.meter),
    )


def remove_from_inbox(connection: Connection, facts: Iterable[Fact]) -> None:
    keys = [fact.key for fact in facts]
    for start in range(0, len(keys), 200):
        connection.execute(
            inbox.delete().where(
                tuple_(inbox.c.project_id, inbox.c.source, inbox.c.meter).in_(keys[start : start + 200])
            )
        )
