"""Usage and bills, read from the books.

``usage`` is live: postings, and what is recorded but not posted yet at the price it will be posted at. ``statement`` is
a month for a customer, from entries alone.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, func, select

from billing.accounts import Kind, project_account
from billing.facts import Fact, fact_of, unposted, usage_source_facts
from billing.moments import DAY, HOUR, month_range
from billing.money import price_of
from billing.poster import rate_of
from billing.price_book import Book
from billing.prices import UnknownPrice
from billing.tables import entries, postings


class By(StrEnum):
    """What usage is grouped by."""

    HOUR = "hour"
    DAY = "day"
    PROJECT = "project"
    KEY = "key"
    SESSION = "session"
    MODEL = "model"
    METER = "meter"
    TAG = "tag"


_COLUMNS: Mapping[By, str] = {
    By.PROJECT: "project_id",
    By.KEY: "key_id",
    By.SESSION: "session_id",
    By.MODEL: "base_model",
    By.METER: "meter",
    By.TAG: "tag",
}
_SPANS: Mapping[By, int] = {By.HOUR: HOUR, By.DAY: DAY}


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Whose usage, and from when (inclusive) to when (exclusive), in microseconds. None: all."""

    project_id: str | None
    sessions: Collection[str] | None = None
    since: int | None = None
    until: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A sum. ``group`` has a value for each thing that was grouped by; of an hour or day its first microsecond."""

    group: Mapping[By, str | int | None]
    quantity: int
    nanos: int


def newest_posting(connection: Connection) -> int:
    """Return the number of the newest posting; 0 when there is none."""
    return connection.execute(select(func.coalesce(func.max(postings.c.number), 0))).scalar_one()


def consumed_after(connection: Connection, after: int, until: int) -> Sequence[tuple[str, str, int]]:
    """Return (base model, meter, quantity) of the usage in the postings numbered (after, until]."""
    rows = connection.execute(
        select(postings.c.base_model, postings.c.meter, func.sum(postings.c.quantity))
        .where(and_(postings.c.number > after, postings.c.number <= until, postings.c.kind == Kind.USAGE))
        .group_by(postings.c.base_model, postings.c.meter)
    )
    return [(base_model, meter, int(quantity)) for base_model, meter, quantity in rows]


def usage(connection: Connection, book: Book, asked: Filter, by: Sequence[By]) -> list[Line]:
    """Return usage summed per combination of ``by``, ordered by it. Sums of different meters do not mix units: group
    by meter when quantities matter."""
    sums: defaultdict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0, 0])
    labels = [_label(dimension, postings.c).label(f"by_{dimension.value}") for dimension in by]
    query = (
        select(*labels, func.sum(postings.c.quantity).label("quantity"), func.sum(postings.c.amount).label("nanos"))
        .where(and_(postings.c.kind == Kind.USAGE.value, *_conditions(asked, postings.c)))
        .group_by(*labels)
    )
    for row in connection.execute(query):
        total = sums[tuple(row[: len(by)])]
        total[0] += int(row.quantity)
        total[1] += int(row.nanos)
    for row in connection.execute(unposted().where(and_(*_conditions(asked, usage_source_facts.c)))).mappings():
        fact = fact_of(row)
        total = sums[tuple(_value(dimension, fact) for dimension in by)]
        total[0] += fact.quantity
        total[1] += _price(book, fact)
    return [
        Line(group=dict(zip(by, values, strict=True)), quantity=total[0], nanos=total[1])
        for values, total in sorted(sums.items(), key=lambda item: [(value is not None, value) for value in item[0]])
    ]


def _label(dimension: By, c: Any) -> ColumnElement[Any]:
    if dimension in _SPANS:
        return c.at - c.at % _SPANS[dimension]
    return c[_COLUMNS[dimension]]


def _value(dimension: By, fact: Fact) -> Any:
    if dimension in _SPANS:
        return fact.at - fact.at % _SPANS[dimension]
    return getattr(fact, _COLUMNS[dimension])


def _conditions(asked: Filter, c: Any) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if asked.project_id is not None:
        conditions.append(c.project_id == asked.project_id)
    if asked.sessions is not None:
        conditions.append(c.session_id.in_(sorted(asked.sessions)))
    if asked.since is not None:
        conditions.append(c.at >= asked.since)
    if asked.until is not None:
        conditions.append(c.at < asked.until)
    return conditions


def _price(book: Book, fact: Fact) -> int:
    """What the fact will be posted at; a fact without a price waits and costs nothing until it has one."""
    try:
        return price_of(fact.quantity, rate_of(book, fact))
    except UnknownPrice:
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StatementLine:
    """Usage of one base model and meter, or a decision with its reason."""

    kind: Kind
    base_model: str | None
    meter: str
    reason: str | None
    quantity: int
    nanos: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A project's month: what it owed before, each line, what it owes at its end. All in nano-USD."""

    project_id: str
    month: str
    opening_nanos: int
    lines: Sequence[StatementLine]
    closing_nanos: int


def statement(connection: Connection, project_id: str, month: str) -> Statement:
    """Return the statement of a UTC month, ``2026-01``, from the entries of the project's account.

    Raises:
        ValueError: not a month.
    """
    start, end = month_range(month)
    mine = entries.c.account == project_account(project_id)
    opening = connection.execute(
        select(func.coalesce(func.sum(entries.c.amount), 0)).join(postings).where(and_(mine, postings.c.at < start))
    ).scalar_one()
    by = (postings.c.kind, postings.c.base_model, postings.c.meter, postings.c.reason)
    rows = connection.execute(
        select(*by, func.sum(postings.c.quantity).label("quantity"), func.sum(entries.c.amount).label("nanos"))
        .join(postings)
        .where(and_(mine, postings.c.at >= start, postings.c.at < end))
        .group_by(*by)
        .order_by(*by)
    )
    lines = [
        StatementLine(
            kind=Kind(row.kind),
            base_model=row.base_model,
            meter=row.meter,
            reason=row.reason,
            quantity=int(row.quantity),
            nanos=int(row.nanos),
        )
        for row in rows
    ]
    return Statement(
        project_id=project_id,
        month=month,
        opening_nanos=int(opening),
        lines=lines,
        closing_nanos=int(opening) + sum(line.nanos for line in lines),
    )
