"""From usage facts to postings, each exactly once.

A trigger puts every new fact into the inbox, in the transaction of the fact itself. One transaction posts a batch,
adds it to the spend of project, key and session, drops the holds that it settles and takes it out of the inbox: killed
at any moment, the batch is either all booked or all still waiting.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, delete, exists, select
from sqlalchemy.dialects import postgresql, sqlite

from billing.accounts import HOUSE_PROJECT
from billing.database import is_postgres, lock_ledger
from billing.facts import Fact, fact_of, remove_from_inbox, unposted, usage_source_facts
from billing.holds import ended
from billing.ledger import append, usage_posting
from billing.moments import moment, month_of
from billing.money import price_of
from billing.price_book import Book, current_book
from billing.prices import UnknownPrice
from billing.tables import holds, inbox, spend

BATCH = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Posted:
    """What one call did. ``unpriced`` facts wait until a price list covers them; they hold up nobody else."""

    postings: int
    unpriced: Sequence[Fact]
    more: bool


def post(connection: Connection, *, at: int, limit: int = BATCH) -> Posted:
    """Post up to ``limit`` waiting facts, oldest first, in the caller's transaction.

    Raises:
        LookupError: no price list was ever applied.
    """
    lock_ledger(connection)
    book = current_book(connection)
    if book is None:
        raise LookupError("no price list was applied yet")
    unpriced: list[Fact] = []
    while facts := _waiting(connection, limit, without={fact.base_model for fact in unpriced}):
        rates = [_rate_or_none(book, fact) for fact in facts]
        unpriced += [fact for fact, rate in zip(facts, rates, strict=True) if rate is None]
        priced = [(fact, rate) for fact, rate in zip(facts, rates, strict=True) if rate is not None]
        if priced:
            _book(connection, priced, book.number, at)
            return Posted(postings=len(priced), unpriced=unpriced, more=len(facts) == limit)
    return Posted(postings=0, unpriced=unpriced, more=False)


_WAITING = (select(inbox.c.source).limit(1), select(holds.c.source).where(ended()).limit(1))


def anything_waits(connection: Connection) -> bool:
    """Return whether there is a fact to post, or a hold of an operation that ended without one."""
    return any(connection.execute(query).first() is not None for query in _WAITING)


def _waiting(connection: Connection, limit: int, *, without: set[str]) -> list[Fact]:
    c = usage_source_facts.c
    query = unposted().order_by(c.at, c.source, c.meter).limit(limit)
    if without:
        query = query.where(c.base_model.not_in(sorted(without)))
    return [fact_of(row) for row in connection.execute(query).mappings()]


def _rate_or_none(book: Book, fact: Fact) -> int | None:
    try:
        return rate_of(book, fact)
    except UnknownPrice:
        return None


def _book(connection: Connection, priced: Sequence[tuple[Fact, int]], price_list: int, at: int) -> None:
    new = [
        usage_posting(fact, amount=price_of(fact.quantity, rate), rate=rate, price_list=price_list, posted_at=at)
        for fact, rate in priced
    ]
    append(connection, new)
    facts = [fact for fact, _ in priced]
    _add_spend(connection, [(fact, posting.amount) for fact, posting in zip(facts, new, strict=True)])
    remove_from_inbox(connection, facts)
    _drop_holds(connection, sorted({fact.source for fact in facts}))


def _drop_holds(connection: Connection, sources: Sequence[str]) -> None:
    """Drop the holds of sources that have nothing left to post: what they cost is spent now."""
    waiting = exists(select(inbox.c.source).where(inbox.c.source == holds.c.source))
    for start in range(0, len(sources), 500):
        connection.execute(delete(holds).where(holds.c.source.in_(sources[start : start + 500]) & ~waiting))


def rate_of(book: Book, fact: Fact) -> int:
    """Return the price of a fact in nano-USD per million units; the house pays nothing.

    Raises:
        UnknownPrice: nothing is quoted.
    """
    if fact.project_id == HOUSE_PROJECT:
        return 0
    return book.prices.rate(fact.base_model, fact.meter, moment(fact.at))


def scopes_of(fact: Fact) -> list[tuple[str, str]]:
    """Return the (scope, id) pairs whose budgets the fact counts against."""
    pairs = [("project", fact.project_id), ("key", fact.key_id), ("session", fact.session_id)]
    return [(scope, id) for scope, id in pairs if id]


def _add_spend(connection: Connection, booked: Sequence[tuple[Fact, int]]) -> None:
    sums: Counter[tuple[str, str, str]] = Counter()
    for fact, amount in booked:
        for scope, id in scopes_of(fact):
            sums[scope, id, month_of(fact.at)] += amount
    rows = [
        {"scope": scope, "scope_id": id, "month": month, "nanos": nanos}
        for (scope, id, month), nanos in sorted(sums.items())
    ]
    insert = postgresql.insert(spend) if is_postgres(connection) else sqlite.insert(spend)
    connection.execute(
        insert.on_conflict_do_update(
            index_elements=[spend.c.scope, spend.c.scope_id, spend.c.month],
            set_={"nanos": spend.c.nanos + insert.excluded.nanos},
        ),
        rows,
    )
