"""Properties of money, on an in-memory database that has nothing but billing's tables and three plain source tables."""

import random
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, create_engine, select, text
from sqlalchemy.pool import StaticPool

from billing import ledger, poster, price_book, statements, storage
from billing.accounts import HOUSE_PROJECT, Entry, Kind, entries_of
from billing.ledger import Posting, Unbalanced
from billing.moments import DAY, HOUR, micros, moment, month_of, month_range
from billing.money import ceiling_of, format_usd, parse_usd, price_of
from billing.prices import METERS, PriceListError
from billing.reconcile import reconcile
from billing.statements import By, Filter
from billing.tables import inbox, metadata, postings, spend

JUNE = micros(moment(0).replace(year=2026, month=6, day=1))
RATES = {"prefill": 20_000_003, "cached_prefill": 4_999_999, "sample": 60_000_001, "train": 119_999_999, "storage": 7}


def listed(rates: dict[str, int], start: str = "2025-01-01T00:00:00Z", until: str | None = None) -> str:
    end = "" if until is None else f"until = {until}\n"
    return f'[[price]]\nbase_model = "*"\nfrom = {start}\n{end}' + "".join(f"{m} = {rates[m]}\n" for m in METERS)


def fresh() -> Connection:
    """Return billing's tables, with the views that migrations make as plain tables."""
    engine = create_engine("sqlite://", poolclass=StaticPool)
    connection = engine.connect()
    metadata.create_all(connection)
    for statement in (
        "CREATE TABLE usage_source_facts (project_id, source, meter, base_model, key_id, session_id, version_id, tag,"
        " engine, quantity INTEGER, at INTEGER)",
        "CREATE TABLE usage_source_operations (source, project_id, key_id, session_id, base_model, kind, status,"
        " tokens)",
        "CREATE TABLE usage_source_versions (id, project_id, base_model, size_bytes, created_at, removed_at)",
    ):
        connection.execute(text(statement))
    price_book.apply(connection, listed(RATES), at=moment(JUNE))
    return connection


def add(connection: Connection, row: dict[str, object]) -> None:
    names = list(row)
    connection.execute(text(f"INSERT INTO usage_source_facts ({', '.join(names)}) VALUES (:{', :'.join(names)})"), row)
    connection.execute(inbox.insert().values({name: row[name] for name in ("project_id", "source", "meter")}))


@st.composite
def facts(draw: st.DrawFn) -> list[dict[str, object]]:
    count = draw(st.integers(1, 25))
    return [
        {
            "project_id": draw(st.sampled_from(["proj-a", "proj-b", HOUSE_PROJECT])),
            "source": f"smp-{index}",
            "meter": draw(st.sampled_from(["prefill", "cached_prefill", "sample"])),
            "base_model": "m",
            "key_id": draw(st.sampled_from(["k1", "k2"])),
            "session_id": draw(st.sampled_from([None, "s1", "s2"])),
            "version_id": None,
            "tag": draw(st.sampled_from([None, "x"])),
            "engine": None,
            "quantity": draw(st.integers(1, 10**9)),
            "at": JUNE + draw(st.integers(0, 60 * DAY)),
        }
        for index in range(count)
    ]


def price(row: dict[str, object]) -> Fraction:
    if row["project_id"] == HOUSE_PROJECT:
        return Fraction(0)
    return Fraction(int(str(row["quantity"])) * RATES[str(row["meter"])], 1_000_000)


def booked(rows: list[dict[str, object]], seed: int) -> tuple[dict[str, int], dict[object, int]]:
    """Add ``rows`` in a random order, posting now and then; return balances and spend."""
    dice, connection = random.Random(seed), fresh()
    for row in dice.sample(rows, len(rows)):
        add(connection, row)
        if dice.random() < 0.4:
            poster.post(connection, at=JUNE, limit=dice.randint(1, 4))
    while poster.post(connection, at=JUNE, limit=3).postings:
        pass
    assert reconcile(connection).differences == []
    by_scope = {(r.scope, r.scope_id, r.month): r.nanos for r in connection.execute(select(spend)) if r.nanos}
    found = ledger.balances(connection), by_scope
    connection.close()
    return found


@settings(max_examples=25, deadline=None)
@given(facts(), st.integers(0, 2**30))
def test_the_order_of_settlement_changes_no_balance_and_no_spend(rows: list[dict[str, object]], seed: int) -> None:
    assert booked(rows, seed) == booked(rows, seed + 1)


@settings(max_examples=25, deadline=None)
@given(facts())
def test_balances_are_the_sums_of_their_entries_within_half_a_nano_per_posting(rows: list[dict[str, object]]) -> None:
    balances, _ = booked(rows, 1)
    exact: Counter[str] = Counter()
    for row in rows:
        exact[f"project/{row['project_id']}"] += price(row)  # pyright: ignore[reportArgumentType]
    assert sum(balances.values()) == 0
    for account, amount in exact.items():
        postings_of = sum(f"project/{row['project_id']}" == account for row in rows)
        assert abs(balances[account] - amount) <= Fraction(postings_of, 2)


@settings(max_examples=25, deadline=None)
@given(facts(), st.integers(0, 25))
def test_usage_is_the_same_before_and_after_it_is_posted(rows: list[dict[str, object]], first: int) -> None:
    connection = fresh()
    for row in rows:
        add(connection, row)
    book = price_book.current_book(connection)
    assert book is not None
    by = [By.DAY, By.PROJECT, By.SESSION, By.METER, By.TAG]
    asked = Filter(project_id=None, since=JUNE + 3 * HOUR)
    before = statements.usage(connection, book, asked, by)
    poster.post(connection, at=JUNE, limit=first + 1)
    half = statements.usage(connection, book, asked, by)
    while poster.post(connection, at=JUNE).postings:
        pass
    assert before == half == statements.usage(connection, book, asked, by)
    month = month_of(JUNE)
    total = sum(line.nanos for line in statements.usage(connection, book, Filter(project_id="proj-a"), [By.PROJECT]))
    june = statements.statement(connection, "proj-a", month)
    july = statements.statement(connection, "proj-a", "2026-07")
    assert (june.opening_nanos, july.opening_nanos, july.closing_nanos) == (0, june.closing_nanos, total)
    connection.close()


@given(st.integers(0, 10**12), st.integers(0, 10**12))
def test_a_ceiling_is_never_below_the_price_and_never_a_nano_above(quantity: int, rate: int) -> None:
    assert 0 <= ceiling_of(quantity, rate) - price_of(quantity, rate) <= 1


@given(st.integers(-(10**18), 10**18))
def test_an_amount_reads_back_as_it_was_written(nanos: int) -> None:
    assert parse_usd(format_usd(nanos).replace("$", "")) == nanos


@pytest.mark.parametrize("amount", ["", "1,5", "0.0000000001", "NaN", "inf", "1e30", "five"])
def test_what_is_no_amount_of_dollars_is_refused(amount: str) -> None:
    with pytest.raises(ValueError, match="not an amount"):
        parse_usd(amount)


def test_entries_that_do_not_add_up_cannot_become_a_posting() -> None:
    with pytest.raises(Unbalanced):
        Posting(
            kind=Kind.USAGE,
            project_id="p",
            source="s",
            meter="sample",
            amount=5,
            at=0,
            posted_at=0,
            entries=(Entry("project/p", 5), Entry("revenue/sample", -4)),
        )
    assert sum(entry.amount for entry in entries_of(Kind.REFUND, "p", "refund", -3)) == 0


@pytest.mark.parametrize("month", ["2026-00", "2026-13", "2026", "26-01", "2026-1", "januar", "2026-01-01"])
def test_what_is_no_month_is_refused(month: str) -> None:
    with pytest.raises(ValueError, match="month"):
        month_range(month)


def test_a_year_of_months_follows_on_one_another() -> None:
    ranges = [month_range(f"2026-{number:02d}") for number in range(1, 13)]
    assert all(earlier[1] == later[0] for earlier, later in pairwise(ranges))
    assert month_range("2026-12")[1] == month_range("2027-01")[0]


def test_storage_is_bytes_times_time_of_the_day_rounded_down_once() -> None:
    connection = fresh()
    rows = [
        ("a", "proj-a", "m", 730_000_000, JUNE, None),  # a whole day: 730 MB x 24 h = 24,000 kB-months
        ("b", "proj-a", "m", 365_000_000, JUNE + 12 * HOUR, None),  # half a day: 6,000
        ("c", "proj-b", "m", 30_000, JUNE, None),  # 0.98: nothing
        ("d", "proj-c", "m", 730_000_000, JUNE - DAY, JUNE + 6 * HOUR),  # deleted after a quarter: 6,000
        ("e", "proj-d", "m", 10**12, JUNE + DAY, None),  # the day after
    ]
    for row in rows:
        names = ("id", "project_id", "base_model", "size_bytes", "created_at", "removed_at")
        connection.execute(
            text(f"INSERT INTO usage_source_versions VALUES (:{', :'.join(names)})"), dict(zip(names, row, strict=True))
        )
    metered = {fact.project_id: fact.quantity for fact in storage.storage_facts(connection, JUNE)}
    assert metered == {"proj-a": 30_000, "proj-c": 6_000}
    assert storage.first_unmetered_day(connection) == JUNE
    connection.close()


def test_a_list_that_changes_the_past_is_refused_and_one_that_changes_the_future_is_not() -> None:
    connection = fresh()
    noon = moment(JUNE + 12 * HOUR)
    with pytest.raises(PriceListError, match="other prices from 2025"):
        price_book.apply(connection, listed({**RATES, "train": 1}), at=noon)
    soon = listed(RATES, until="2026-06-01T12:00:30Z") + listed({**RATES, "train": 1}, start="2026-06-01T12:00:30Z")
    with pytest.raises(PriceListError, match="2026-06-01T12:00:30"):
        price_book.apply(connection, soon, at=noon)
    later = soon.replace("12:00:30", "13:00:00")
    book = price_book.apply(connection, later, at=noon)
    assert (book.number, price_book.apply(connection, later, at=noon).number) == (2, 2)
    assert [book.prices.rate("m", "train", moment(JUNE + hour * HOUR)) for hour in (12, 13)] == [RATES["train"], 1]
    assert book.prices.highest_rate("m", "train", noon, moment(JUNE + 14 * HOUR)) == RATES["train"]
    connection.close()


def test_postings_are_priced_by_the_list_of_their_time() -> None:
    connection = fresh()
    change = listed(RATES, until="2026-06-02T00:00:00Z") + listed(
        {**RATES, "sample": 1_000_000}, "2026-06-02T00:00:00Z"
    )
    price_book.apply(connection, change, at=moment(JUNE))
    base = {"project_id": "p", "meter": "sample", "base_model": "m", "key_id": "k", "quantity": 1_000}
    none = {"session_id": None, "version_id": None, "tag": None, "engine": None}
    for name, at in (("old", JUNE), ("new", JUNE + DAY)):
        add(connection, {**base, **none, "source": name, "at": at})
    poster.post(connection, at=JUNE + 2 * DAY)
    rates = {row.source: row.rate for row in connection.execute(select(postings.c.source, postings.c.rate))}
    assert rates == {"old": RATES["sample"], "new": 1_000_000}
    assert reconcile(connection).differences == []
    connection.close()
