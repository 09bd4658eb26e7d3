"""The price lists that were applied, oldest first; the newest one counts. A list never changes the past.

So every list agrees with its successors on what is over, and a posting can be re-derived from the list it names.
"""

import hashlib
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache

from sqlalchemy import Connection, RowMapping, func, select

from billing.database import lock_ledger
from billing.moments import micros
from billing.prices import PriceList, PriceListError
from billing.tables import price_lists

NOTICE = timedelta(seconds=60)  # every running gateway has read the new list by then


@dataclass(frozen=True, slots=True, kw_only=True)
class Book:
    """A price list and the number it was applied under."""

    number: int
    digest: str
    prices: PriceList


def current_book(connection: Connection) -> Book | None:
    """Return the newest list, None before the first."""
    row = connection.execute(select(price_lists).order_by(price_lists.c.number.desc()).limit(1)).mappings().first()
    return None if row is None else _book_of(row)


def newest_number(connection: Connection) -> int:
    return connection.execute(select(func.coalesce(func.max(price_lists.c.number), 0))).scalar_one()


def was_applied(connection: Connection, text: str) -> bool:
    query = select(price_lists.c.number).where(price_lists.c.digest == digest_of(text)).limit(1)
    return connection.execute(query).first() is not None


def all_books(connection: Connection) -> dict[int, Book]:
    rows = connection.execute(select(price_lists)).mappings()
    return {row["number"]: _book_of(row) for row in rows}


def apply(connection: Connection, text: str, *, at: datetime) -> Book:
    """Make ``text`` the list that counts and return it; applying the present list again changes nothing.

    Raises:
        PriceListError: a list with a mistake, or one that quotes something else for a time before ``at`` + ``NOTICE``.
    """
    prices = PriceList.parse(text)
    lock_ledger(connection)
    present = current_book(connection)
    digest = digest_of(text)
    if present is not None:
        if present.digest == digest:
            return present
        check_change(present.prices, prices, at=at)
    number = 1 if present is None else present.number + 1
    connection.execute(price_lists.insert().values(number=number, digest=digest, text=text, applied_at=micros(at)))
    return Book(number=number, digest=digest, prices=prices)


def check_change(present: PriceList, proposed: PriceList, *, at: datetime) -> None:
    """Check that ``proposed`` may follow ``present``.

    Raises:
        PriceListError: it changes what is over, or what begins within ``NOTICE``.
    """
    first = present.first_difference(proposed)
    if first is not None and first < at + NOTICE:
        raise PriceListError(
            f"the list quotes other prices from {first.isoformat()} on; prices may change from "
            f"{(at + NOTICE).isoformat(timespec='seconds')} on: close a price with until and add the next one"
        )


def _book_of(row: RowMapping) -> Book:
    return Book(number=row["number"], digest=row["digest"], prices=_parsed(row["text"]))


_parsed = lru_cache(maxsize=8)(PriceList.parse)


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
