"""What a reconciliation checks, check by check. Each yields the differences it finds; an honest ledger yields none."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, RowMapping, func, select

from billing import engines, price_book, storage
from billing.accounts import Entry, Kind, entries_of
from billing.facts import Fact, columns, fact_of
from billing.holds import usage_source_operations
from billing.ledger import COLUMNS, GENESIS, Posting, hash_of
from billing.moments import DAY, month_of
from billing.money import price_of
from billing.poster import rate_of, scopes_of
from billing.price_book import Book
from billing.prices import PriceListError, UnknownPrice
from billing.tables import entries, inbox, ledger_head, postings, price_lists, spend

METERED = ("forward", "forward_backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something that is not as it must be: ``where`` names the row, ``found`` and ``expected`` what is wrong."""

    check: str
    where: str
    found: str
    expected: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """Everything the checks compare, read in one snapshot."""

    facts: Mapping[tuple[str, str, str], Fact]
    postings: Mapping[int, Posting]
    rows: Sequence[RowMapping]
    waiting: frozenset[tuple[str, str, str]]
    lists: Mapping[int, Book]


def read_books(connection: Connection, lists: Mapping[int, Book]) -> tuple[Books, list[Difference]]:
    """Read the books; what cannot be read at all is a difference."""
    wrong: list[Difference] = []
    facts = {fact.key: fact for fact in map(fact_of, connection.execute(select(*columns())).mappings())}
    halves: defaultdict[int, list[tuple[int, Entry]]] = defaultdict(list)
    for row in connection.execute(select(entries).order_by(entries.c.posting, entries.c.line)):
        halves[row.posting].append((row.line, Entry(row.account, row.amount)))
    rows: list[RowMapping] = []
    known: dict[int, Posting] = {}
    for row in connection.execute(select(postings).order_by(postings.c.number)).mappings():
        rows.append(row)
        lines = halves.pop(row["number"], [])
        if [line for line, _ in lines] != list(range(1, len(lines) + 1)):
            wrong.append(_of_posting("entries", row["number"], "lines missing", "1, 2, ..."))
        try:
            values: dict[str, Any] = {name: row[name] for name in COLUMNS} | {"kind": Kind(row["kind"])}
            known[row["number"]] = Posting(**values, entries=tuple(entry for _, entry in lines))
        except ValueError as error:
            wrong.append(_of_posting("balance", row["number"], str(error), "entries that add up to 0"))
    wrong += [_of_posting("entries", number, "entries", "a posting") for number in halves]
    waiting = frozenset(tuple(row) for row in connection.execute(select(inbox)))
    return Books(facts=facts, postings=known, rows=rows, waiting=waiting, lists=lists), wrong


def check_price_lists(connection: Connection) -> Iterator[Difference]:
    for expected, row in enumerate(connection.execute(select(price_lists).order_by(price_lists.c.number)), start=1):
        if row.number != expected:
            yield Difference(check="price list", where=f"list {row.number}", found="a gap", expected=str(expected))
        if price_book.digest_of(row.text) != row.digest:
            yield Difference(
                check="price list", where=f"list {row.number}", found="another text", expected=f"sha256 {row.digest}"
            )


def check_chain(books: Books) -> Iterator[Difference]:
    """Numbers without gaps, each posting linked to the one before it, each hash that of its content."""
    previous = GENESIS
    for expected, row in enumerate(books.rows, start=1):
        number = row["number"]
        if number != expected:
            yield _of_posting("chain", number, f"number {number}", f"number {expected}")
            return
        if row["previous"] != previous:
            yield _of_posting("chain", number, f"previous {row['previous'][:12]}", previous[:12])
        posting = books.postings.get(number)
        if posting is not None and hash_of(number, row["previous"], posting) != row["hash"]:
            yield _of_posting("chain", number, "a row that was changed", f"hash {row['hash'][:12]}")
        previous = row["hash"]


def check_head(connection: Connection, books: Books) -> Iterator[Difference]:
    """The last posting is the one that was booked last: an end that was cut off shows."""
    kept = connection.execute(select(ledger_head.c.number, ledger_head.c.hash)).first()
    last = (books.rows[-1]["number"], books.rows[-1]["hash"]) if books.rows else None
    if (None if kept is None else (kept.number, kept.hash)) != last:
        yield Difference(check="chain", where="its end", found=str(last), expected=str(kept))


def check_postings(books: Books) -> Iterator[Difference]:
    """Every usage posting from its fact and price, every entry from its posting."""
    seen: Counter[tuple[str, str, str]] = Counter()
    for number, posting in books.postings.items():
        if posting.entries != entries_of(posting.kind, posting.project_id, posting.meter, posting.amount):
            yield _of_posting("entries", number, str(posting.entries), "those of its kind and amount")
        if posting.kind is not Kind.USAGE:
            continue
        key = (posting.project_id, posting.source, posting.meter)
        seen[key] += 1
        fact = books.facts.get(key)
        if fact is None:
            yield _of_posting("facts", number, "a posting", f"a fact {'/'.join(key)}")
            continue
        for name in Fact.__dataclass_fields__:
            if getattr(posting, name) != getattr(fact, name):
                yield _of_posting(
                    "facts", number, f"{name} {getattr(posting, name)}", f"{name} {getattr(fact, name)} as in its fact"
                )
        yield from _check_price(books, number, posting, fact)
    for key, fact in books.facts.items():
        waits = key in books.waiting
        if seen[key] + waits != 1:
            yield Difference(
                check="facts",
                where="/".join(fact.key),
                found=f"{seen[key]} postings, {'waiting' if waits else 'not waiting'}",
                expected="one of the two",
            )
    for key in books.waiting - books.facts.keys():
        yield Difference(check="facts", where="/".join(key), found="waiting in the inbox", expected="a fact")


def _check_price(books: Books, number: int, posting: Posting, fact: Fact) -> Iterator[Difference]:
    book = books.lists.get(posting.price_list or 0)
    try:
        rate = None if book is None else rate_of(book, fact)
    except UnknownPrice:
        rate = None
    if rate != posting.rate:
        yield _of_posting("price", number, f"rate {posting.rate}", f"rate {rate} of list {posting.price_list}")
    if price_of(posting.quantity, posting.rate) != posting.amount:
        yield _of_posting(
            "price", number, f"amount {posting.amount}", f"amount {price_of(posting.quantity, posting.rate)}"
        )


def check_spend(connection: Connection, books: Books) -> Iterator[Difference]:
    """The projection that budgets read."""
    expected: Counter[tuple[str, str, str]] = Counter()
    for posting in books.postings.values():
        fact = books.facts.get((posting.project_id, posting.source, posting.meter))
        if posting.kind is Kind.USAGE and fact is not None:
            for scope, id in scopes_of(fact):
                expected[scope, id, month_of(posting.at)] += posting.amount
    found = {(row.scope, row.scope_id, row.month): int(row.nanos) for row in connection.execute(select(spend))}
    for key in sorted(expected.keys() | found.keys()):
        if expected[key] != found.get(key, 0):
            yield Difference(
                check="spend", where="/".join(key), found=str(found.get(key)), expected=f"{expected[key]} nano-USD"
            )


def check_balances(connection: Connection, books: Books) -> Iterator[Difference]:
    """All accounts together are zero, and each project owes the sum of its postings."""
    sums = {
        row.account: int(row.amount)
        for row in connection.execute(
            select(entries.c.account, func.sum(entries.c.amount).label("amount")).group_by(entries.c.account)
        )
    }
    if sum(sums.values()):
        yield Difference(check="balance", where="all accounts", found=str(sum(sums.values())), expected="0 nano-USD")
    owed: Counter[str] = Counter()
    for row in books.rows:
        owed[f"project/{row['project_id']}"] += row["amount"]
    for account in sorted(owed.keys() | {name for name in sums if name.startswith("project/")}):
        if owed[account] != sums.get(account, 0):
            yield Difference(
                check="balance", where=account, found=str(sums.get(account)), expected=f"{owed[account]} nano-USD"
            )


def check_operations(connection: Connection, books: Books) -> Iterator[Difference]:
    """Each completed forward or forward_backward has its fact, over its own tokens, and each completed score one;
    nothing that did not complete has any."""
    facts = {fact.source: fact for fact in books.facts.values() if fact.meter == "train" or fact.source[:4] == "scr-"}
    for row in connection.execute(select(usage_source_operations)).mappings():
        fact = facts.pop(row["source"], None)
        where = f"operation {row['source']}"
        billed = 0 if fact is None else fact.quantity
        match row["kind"], row["tokens"], row["status"]:
            case "score", _, "completed":
                due = max(1, billed)  # how much it scored is in its payload, which is kept for a day only
            case kind, None, _ if kind in METERED:
                due = billed  # submitted before tokens were recorded
            case _, tokens, "completed":
                due = tokens or 0
            case _:
                due = 0
        if billed != due:
            found, expected = f"{billed} tokens billed", f"{due} ({row['status']})"
            yield Difference(check="operations", where=where, found=found, expected=expected)
        if fact is not None:
            for name in ("project_id", "key_id", "session_id", "base_model"):
                if getattr(fact, name) != row[name]:
                    found = f"{name} {getattr(fact, name)}"
                    yield Difference(check="operations", where=where, found=found, expected=str(row[name]))
    for source, fact in facts.items():
        if fact.meter == "train":  # a score is forgotten after a day, an operation never
            yield Difference(check="operations", where=f"operation {source}", found="a fact", expected="an operation")


def check_storage(connection: Connection, books: Books) -> Iterator[Difference]:
    """Each metered day from the versions there were."""
    metered: defaultdict[int, dict[tuple[str, str], Fact]] = defaultdict(dict)
    for fact in books.facts.values():
        if fact.meter == storage.METER:
            metered[storage.day_of(fact.at)][fact.project_id, fact.source] = fact
    for day in range(min(metered), max(metered) + DAY, DAY) if metered else ():
        due = {(fact.project_id, fact.source): fact for fact in storage.storage_facts(connection, day)}
        for key in sorted(due.keys() | metered[day].keys()):
            found, expected = metered[day].get(key), due.get(key)
            if found != expected:
                yield Difference(
                    check="storage",
                    where="/".join(key),
                    found=f"{found.quantity if found else 0} kB-months",
                    expected=f"{expected.quantity if expected else 0} kB-months",
                )


def check_readings(connection: Connection) -> Iterator[Difference]:
    """Each engine at its last quiet reading, also of processes that are gone."""
    for reading in engines.readings(connection):
        if reading.said != reading.counted:
            yield Difference(
                check="engines",
                where=f"{reading.engine} started at {reading.started_at}",
                found=f"{reading.counted.prompt} prompt and {reading.counted.generation} generated tokens in facts",
                expected=f"{reading.said.prompt} and {reading.said.generation} by its counters",
            )


def read_lists(connection: Connection) -> tuple[Mapping[int, Book], list[Difference]]:
    try:
        return price_book.all_books(connection), []
    except PriceListError as error:
        return {}, [Difference(check="price list", where="price_lists", found=str(error), expected="readable lists")]


def _of_posting(check: str, number: int, found: str, expected: str) -> Difference:
    return Difference(check=check, where=f"posting {number}", found=found, expected=expected)
