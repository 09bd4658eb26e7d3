"""The books on both databases: each fact is posted once, and whatever is changed behind their back is found."""

import asyncio
import random
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Table, func, select, text
from sqlalchemy.exc import DBAPIError

from billing import ledger
from billing.accounts import Kind
from billing.database import writing
from billing.moments import micros
from billing.money import price_of
from billing.reconcile import reconcile
from billing.tables import entries, inbox, ledger_head, postings, price_lists, spend
from gateway.core.usage import HOUSE, Meter
from gateway.store.tables import usage_facts
from tests.billing.books import RATES, Books, disarm

ROOT = Path(__file__).parents[2]


async def numbers(books: Books) -> list[int]:
    return await books.look(lambda c: list(c.execute(select(postings.c.number).order_by(postings.c.number)).scalars()))


async def filled(books: Books, facts: int = 40) -> None:
    """Post usage of every meter, of several sessions and days, and one decision of each kind."""
    dice = random.Random(7)
    for index in range(facts):
        await books.add(
            books.fact(
                f"smp-{index}",
                dice.randint(1, 5000),
                dice.choice([Meter.PREFILL, Meter.CACHED_PREFILL, Meter.SAMPLE]),
                session_id=f"sess-{index % 3}" if index % 4 else None,
                tag="nightly" if index % 5 == 0 else None,
                at=books.clock.now() + timedelta(hours=index),
            )
        )
    await books.post_all()
    for kind, amount in ((Kind.CREDIT, -5_000), (Kind.REFUND, -70), (Kind.ADJUSTMENT, 900)):
        await books.database.change(
            lambda c, kind=kind, amount=amount: ledger.decide(
                c,
                kind,
                project_id=books.project_id,
                amount=amount,
                reason="goodwill",
                source=f"adm-{kind.value}",
                at=books.now,
            )
        )


async def test_a_fact_becomes_one_posting_of_two_entries_that_add_up_to_nothing(books: Books) -> None:
    await books.add(books.fact("op-1", 2_500))

    assert (await books.post()).postings == 1
    cost = price_of(2_500, RATES["sample"])
    assert await books.look(ledger.balances) == {f"project/{books.project_id}": cost, "revenue/sample": -cost}
    assert cost == 150_000  # 2500 x 60.000001, half even
    report = books.report()
    assert (report.facts, report.postings, report.owed_nanos, report.differences) == (1, 1, cost, [])


async def test_two_thousand_replayed_facts_make_no_duplicate(books: Books) -> None:
    facts = [books.fact(f"op-{index}", index + 1) for index in range(100)]

    async def replay(seed: int) -> None:
        shuffled = random.Random(seed).sample(facts, len(facts))
        for start in range(0, len(shuffled), 25):
            await books.add(*shuffled[start : start + 25])
            await books.post(limit=30)

    await asyncio.gather(*(replay(seed) for seed in range(20)))
    await books.post_all()

    assert await numbers(books) == list(range(1, 101))
    assert books.report().differences == []


async def test_a_poster_that_dies_leaves_all_or_nothing(books: Books) -> None:
    await books.add(*(books.fact(f"op-{index}") for index in range(5)))

    def dies(connection: Connection) -> None:
        from billing import poster

        poster.post(connection, at=books.now)
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        await books.database.change(dies)
    assert await numbers(books) == []
    assert await books.post_all() == 5
    assert books.report().differences == []


async def test_usage_without_a_price_waits_and_holds_up_nobody(books: Books) -> None:
    await books.add(*(books.fact(f"op-{index}", base_model="unheard-of") for index in range(4)))
    await books.add(books.fact("op-9"))

    posted = await books.post(limit=3)
    assert (posted.postings, {fact.base_model for fact in posted.unpriced}) == (1, {"unheard-of"})
    report = books.report()
    assert (report.waiting, report.differences) == (4, [])


async def test_what_the_house_consumes_is_posted_at_nothing(books: Books) -> None:
    await books.add(books.fact("probe-1", 12, Meter.PREFILL, project_id=HOUSE, base_model="unheard-of"))

    assert (await books.post()).postings == 1
    assert await books.look(lambda c: ledger.balance(c, HOUSE)) == 0
    assert books.report().differences == []


@pytest.mark.parametrize("table", [postings, entries, price_lists, usage_facts], ids=lambda table: table.name)
@pytest.mark.parametrize("verb", ["update", "delete"])
async def test_the_database_refuses_to_change_the_past(books: Books, table: Table, verb: str) -> None:
    await filled(books, 3)
    column = next(iter(table.c)).name
    statement = f"UPDATE {table.name} SET {column} = {column}" if verb == "update" else f"DELETE FROM {table.name}"

    with pytest.raises(DBAPIError, match="append-only"):
        await books.database.change(lambda c: c.execute(text(statement)))


async def test_a_decision_is_booked_once_and_needs_a_reason_and_the_right_sign(books: Books) -> None:
    def decide(kind: Kind, amount: int, reason: str = "outage", source: str = "adm-1") -> Any:
        return books.database.change(
            lambda c: ledger.decide(
                c, kind, project_id=books.project_id, amount=amount, reason=reason, source=source, at=books.now
            )
        )

    assert await decide(Kind.CREDIT, -500) is True
    assert await decide(Kind.CREDIT, -500) is False
    for kind, amount, reason in (
        (Kind.CREDIT, -501, "outage"),
        (Kind.CREDIT, 1, "outage"),
        (Kind.REFUND, 0, "outage"),
        (Kind.ADJUSTMENT, 0, "outage"),
        (Kind.ADJUSTMENT, 5, "  "),
    ):
        with pytest.raises(ValueError, match=r"must not|reason|already"):
            await decide(kind, amount, reason, "adm-1" if reason != "  " else "adm-2")
    assert await books.look(lambda c: ledger.balance(c, books.project_id)) == -500
    assert books.report().differences == []


async def test_a_hundred_random_edits_behind_the_applications_back_are_all_found(books: Books) -> None:
    await filled(books)
    assert books.report().differences == []
    dice = random.Random(11)
    missed: list[str] = []
    for _ in range(100):
        with writing(books.url) as connection:
            disarm(connection)
            edit = random_edit(connection, dice)
            if not reconcile(connection).differences:
                missed.append(edit)
            connection.rollback()
    assert missed == []


def random_edit(connection: Connection, dice: random.Random) -> str:
    """Change one value of one row of the books to another one that the constraints allow, and say which."""
    while True:
        table = dice.choice([postings, postings, entries, usage_facts, spend, price_lists])
        rows = connection.execute(select(table)).mappings().all()
        row = dice.choice(rows)
        column = dice.choice([c for c in table.c if c.name not in ("applied_at", "engine")])
        here = row[column]
        raw = micros(here) if hasattr(here, "year") else here
        match raw:
            case None:
                value: Any = 77 if column.name == "price_list" else "someone-else"
            case int():
                value = raw + dice.choice([1, -1, 1000])
            case _:
                value = {"usage": "credit", "project": "key"}.get(raw, raw[:-1] + chr(ord(raw[-1]) ^ 1))
        where = " AND ".join(f'"{key.name}" = :k{index}' for index, key in enumerate(table.primary_key))
        keys = {f"k{index}": row[key] for index, key in enumerate(table.primary_key)}
        savepoint = connection.begin_nested()
        try:
            done = connection.execute(
                text(f'UPDATE {table.name} SET "{column.name}" = :value WHERE {where}'), {"value": value, **keys}
            )
        except DBAPIError:
            savepoint.rollback()
            continue
        savepoint.commit()
        assert done.rowcount == 1
        return f"{table.name}.{column.name}: {raw} -> {value}"


@pytest.mark.parametrize(
    "table", [postings, entries, inbox, usage_facts, spend, ledger_head], ids=lambda table: table.name
)
async def test_a_row_that_is_gone_is_found(books: Books, table: Table) -> None:
    await filled(books, 6)
    await books.add(books.fact("op-waiting"))
    with writing(books.url) as connection:
        disarm(connection)
        last = connection.execute(select(table).order_by(*(c.desc() for c in table.primary_key)).limit(1)).mappings()
        row = last.one()
        where = " AND ".join(f'"{key.name}" = :{key.name}' for key in table.primary_key)
        if table is postings:
            connection.execute(text("DELETE FROM ledger_entries WHERE posting = :number"), {"number": row["number"]})
        connection.execute(text(f"DELETE FROM {table.name} WHERE {where}"), {k.name: row[k] for k in table.primary_key})
        assert reconcile(connection).differences != []
        connection.rollback()


async def test_reconcile_says_by_its_exit_status_whether_the_books_are_right(books: Books) -> None:
    await filled(books, 4)
    command = [sys.executable, "-m", "billing.reconcile", "--database", books.url]

    def run() -> "subprocess.CompletedProcess[str]":
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)

    good = run()
    assert (good.returncode, good.stdout.splitlines()[-1]) == (0, "No difference.")
    with writing(books.url) as connection:
        disarm(connection)
        connection.execute(text("UPDATE ledger_postings SET quantity = quantity + 1 WHERE number = 2"))
    bad = run()
    assert bad.returncode == 1
    assert "DIFFERENCE in chain, posting 2" in bad.stdout
    command[-1] = "sqlite:////nonexistent/loopline.db"
    assert run().returncode == 2


async def test_accounts_are_in_balance(books: Books) -> None:
    await filled(books)
    total = await books.look(lambda c: c.execute(select(func.sum(entries.c.amount))).scalar_one())
    assert int(total) == 0
