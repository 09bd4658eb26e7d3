"""The books: postings of two entries that add up to zero, chained by hash, never changed.

Posting ``n`` carries the hash of posting ``n - 1`` and its own, over all its columns and entries. Whoever posts is
alone (``lock_ledger``), so numbers have no gaps. A posting is unique by (project, source, meter): booking it twice is
a no-op for the caller who asks first (``known``), and a constraint for everybody else.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, select
from sqlalchemy.dialects import postgresql, sqlite

from billing.accounts import Entry, Kind, check_direction, entries_of, project_account
from billing.database import is_postgres, lock_ledger
from billing.facts import Fact
from billing.money import MOST
from billing.tables import entries, ledger_head, postings

GENESIS = "0" * 64  # what the first posting follows


class Unbalanced(ValueError):
    """Entries that do not add up to zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Posting:
    """One booking: ``project_id`` owes ``amount`` nano-USD more. ``at`` and ``posted_at`` are in microseconds."""

    kind: Kind
    project_id: str
    source: str
    meter: str
    amount: int
    at: int
    posted_at: int
    entries: tuple[Entry, ...]
    quantity: int = 0
    rate: int = 0
    price_list: int | None = None
    base_model: str | None = None
    key_id: str | None = None
    session_id: str | None = None
    version_id: str | None = None
    tag: str | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        if off := sum(entry.amount for entry in self.entries):
            raise Unbalanced(f"posting of {self.source} is off by {off} nanos")
        if abs(self.amount) > MOST:
            raise ValueError(f"{self.amount} nano-USD is more than the books hold")


COLUMNS = tuple(name for name in Posting.__dataclass_fields__ if name != "entries")


@dataclass(frozen=True, slots=True)
class Head:
    """The last posting: its number and hash."""

    number: int
    hash: str


def head(connection: Connection) -> Head:
    row = connection.execute(select(postings.c.number, postings.c.hash).order_by(postings.c.number.desc()).limit(1))
    last = row.first()
    return Head(0, GENESIS) if last is None else Head(last.number, last.hash)


def hash_of(number: int, previous: str, posting: Posting) -> str:
    """Return the hash of a posting: sha256 over a JSON array of everything it says, in a fixed order."""
    said = [number, previous, *(getattr(posting, name) for name in COLUMNS)]
    said.append([[entry.account, entry.amount] for entry in posting.entries])
    return hashlib.sha256(json.dumps(said, separators=(",", ":")).encode()).hexdigest()


def append(connection: Connection, new: Sequence[Posting]) -> Head:
    """Append postings and return the new head. The caller holds ``lock_ledger``."""
    last = head(connection)
    rows: list[dict[str, Any]] = []
    halves: list[dict[str, Any]] = []
    for posting in new:
        number = last.number + 1
        own = hash_of(number, last.hash, posting)
        columns = {name: getattr(posting, name) for name in COLUMNS}
        rows.append({**columns, "kind": posting.kind.value, "number": number, "previous": last.hash, "hash": own})
        halves += [
            {"posting": number, "line": line, "account": entry.account, "amount": entry.amount}
            for line, entry in enumerate(posting.entries, start=1)
        ]
        last = Head(number, own)
    if rows:
        connection.execute(postings.insert(), rows)
        connection.execute(entries.insert(), halves)
        here = {"number": last.number, "hash": last.hash}
        insert = (postgresql if is_postgres(connection) else sqlite).insert(ledger_head).values(one=1, **here)
        connection.execute(insert.on_conflict_do_update(index_elements=[ledger_head.c.one], set_=here))
    return last


def usage_posting(fact: Fact, *, amount: int, rate: int, price_list: int, posted_at: int) -> Posting:
    """Return the posting of one usage fact."""
    check_direction(Kind.USAGE, amount)
    return Posting(
        kind=Kind.USAGE,
        project_id=fact.project_id,
        source=fact.source,
        meter=fact.meter,
        amount=amount,
        at=fact.at,
        posted_at=posted_at,
        entries=entries_of(Kind.USAGE, fact.project_id, fact.meter, amount),
        quantity=fact.quantity,
        rate=rate,
        price_list=price_list,
        base_model=fact.base_model,
        key_id=fact.key_id,
        session_id=fact.session_id,
        version_id=fact.version_id,
        tag=fact.tag,
    )


def decide(
    connection: Connection, kind: Kind, *, project_id: str, amount: int, reason: str, source: str, at: int
) -> bool:
    """Book a credit, refund or adjustment that somebody decided on; return whether it is new.

    ``amount`` is what the project owes more: credits and refunds are negative. ``source`` names the decision: booking
    it a second time changes nothing.

    Raises:
        ValueError: the wrong sign, no reason, or a source that booked something else.
    """
    check_direction(kind, amount)
    if not reason.strip() or kind is Kind.USAGE:
        raise ValueError("a credit, refund or adjustment needs a reason")
    lock_ledger(connection)
    known = known_amount(connection, project_id, source, kind.value)
    if known is not None:
        if known != amount:
            raise ValueError(f"{source} was booked already, with {known} nano-USD")
        return False
    posting = Posting(
        kind=kind,
        project_id=project_id,
        source=source,
        meter=kind.value,
        amount=amount,
        at=at,
        posted_at=at,
        entries=entries_of(kind, project_id, kind.value, amount),
        reason=reason,
    )
    append(connection, [posting])
    return True


def known_amount(connection: Connection, project_id: str, source: str, meter: str) -> int | None:
    row = connection.execute(
        select(postings.c.amount).where(
            (postings.c.project_id == project_id) & (postings.c.source == source) & (postings.c.meter == meter)
        )
    ).first()
    return None if row is None else row.amount


def balance(connection: Connection, project_id: str) -> int:
    """Return what the project owes, in nano-USD: the sum of its account's entries."""
    query = select(func.coalesce(func.sum(entries.c.amount), 0)).where(entries.c.account == project_account(project_id))
    return int(connection.execute(query).scalar_one())


def balances(connection: Connection) -> dict[str, int]:
    """Return the balance of every account."""
    query = select(entries.c.account, func.sum(entries.c.amount).label("amount")).group_by(entries.c.account)
    return {row.account: int(row.amount) for row in connection.execute(query)}
