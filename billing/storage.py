"""Storage: what saved versions occupy, metered once per UTC day and priced per GB-month.

A unit is a kilobyte (1000 bytes) for a month of 730 hours, so a million units are the GB-month that prices quote.
A day's fact of a project and base model adds up bytes times time over its versions and rounds down once.
"""

from collections import defaultdict
from collections.abc import Sequence

from sqlalchemy import BigInteger, Connection, Text, and_, column, func, or_, select, table

from billing.facts import Fact, usage_source_facts
from billing.moments import DAY, HOUR, moment
from billing.tables import price_lists

METER = "storage"
_UNIT = 1000 * 730 * HOUR  # byte-microseconds

usage_source_versions = table(
    "usage_source_versions",
    *(column(name, Text) for name in ("id", "project_id", "base_model")),
    *(column(name, BigInteger) for name in ("size_bytes", "created_at", "removed_at")),
)


def day_of(at: int) -> int:
    """Return the first microsecond of the UTC day that ``at`` lies in."""
    return at - at % DAY


def source_of(day: int, base_model: str) -> str:
    return f"storage-{moment(day):%Y-%m-%d}-{base_model}"


def storage_facts(connection: Connection, day: int) -> Sequence[Fact]:
    """Return the facts of the UTC day that begins at ``day``, recorded as of its last instant."""
    v = usage_source_versions.c
    end = day + DAY
    rows = connection.execute(
        select(usage_source_versions).where(and_(v.created_at < end, or_(v.removed_at.is_(None), v.removed_at > day)))
    ).mappings()
    occupied: defaultdict[tuple[str, str], int] = defaultdict(int)
    for row in rows:
        until = end if row["removed_at"] is None else min(end, row["removed_at"])
        whose = (row["project_id"], row["base_model"])
        occupied[whose] += row["size_bytes"] * max(0, until - max(day, row["created_at"]))
    return [
        Fact(
            project_id=project_id,
            source=source_of(day, base_model),
            meter=METER,
            quantity=units,
            base_model=base_model,
            key_id="",
            session_id=None,
            version_id=None,
            tag=None,
            at=end - 1,
        )
        for (project_id, base_model), size in sorted(occupied.items())
        if (units := size // _UNIT) > 0
    ]


def first_unmetered_day(connection: Connection) -> int | None:
    """Return the first day that may still have to be metered: after the last one that was, never before there were
    prices or versions. None: there is nothing to meter."""
    applied = connection.execute(select(func.min(price_lists.c.applied_at))).scalar_one()
    saved = connection.execute(select(func.min(usage_source_versions.c.created_at))).scalar_one()
    if applied is None or saved is None:
        return None
    f = usage_source_facts.c
    last = connection.execute(select(func.max(f.at)).where(f.meter == METER)).scalar_one()
    return max(day_of(applied), day_of(saved), 0 if last is None else day_of(last) + DAY)
