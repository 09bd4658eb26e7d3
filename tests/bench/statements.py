"""`make bench-statements`: a month of traffic (100,000 usage facts) is posted, and its statement printed.

Fails when the month's statement takes more than 2 seconds on SQLite.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from sqlalchemy import text

import migrations
from billing import poster, price_book, statements
from billing.database import reading, writing
from billing.moments import DAY, HOUR, moment, month_range
from billing.prices import shipped_prices
from billing.reconcile import run as reconcile
from billing.statements import By, Filter

MONTH = "2026-10"
LIMIT_S = 2.0


def fill(url: str, facts: int) -> None:
    """Record a month of usage of three projects, some hundred keys and sessions."""
    dice, (start, _) = random.Random(1), month_range(MONTH)
    rows = [
        {
            "source": f"smp-{index // 2}",
            "meter": ("prefill", "sample")[index % 2],
            "quantity": dice.randint(1, 4000),
            "project_id": f"proj-{index // 2 % 3}",
            "key_id": f"key-{index // 2 % 97}",
            "session_id": f"sess-{index // 2 % 211}" if index % 5 else None,
            "base_model": ("small", "large")[index // 2 % 2],
            "at": start + index // 2 * (30 * DAY // (facts // 2 + 1)),
        }
        for index in range(facts)
    ]
    with writing(url) as connection:
        for number in range(3):
            connection.execute(
                text("INSERT INTO projects (id, name, created_at) VALUES (:id, :id, 0)"), {"id": f"proj-{number}"}
            )
        names = list(rows[0])
        connection.execute(text(f"INSERT INTO usage_facts ({', '.join(names)}) VALUES (:{', :'.join(names)})"), rows)
        price_book.apply(connection, shipped_prices().read_text(), at=moment(start))


def post_all(url: str) -> int:
    done = 0
    while True:
        with writing(url) as connection:
            posted = poster.post(connection, at=month_range(MONTH)[1])
        done += posted.postings
        if not posted.postings:
            return done


def timed(name: str, work) -> float:
    started = time.perf_counter()
    found = work()
    seconds = time.perf_counter() - started
    print(f"  {name}: {seconds:.2f} s, {found}")
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.statements", description=__doc__)
    parser.add_argument("--facts", type=int, default=100_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="loopline-month-") as directory:
        url = f"sqlite:///{Path(directory) / 'loopline.db'}"
        migrations.upgrade(url)
        fill(url, options.facts)
        print(f"{options.facts} facts in {MONTH}")
        timed("posted", lambda: f"{post_all(url)} postings")

        def month() -> str:
            with reading(url) as connection:
                found = statements.statement(connection, "proj-1", MONTH)
            return f"{len(found.lines)} lines, {found.closing_nanos} nano-USD"

        def by_hour() -> str:
            start, end = month_range(MONTH)
            with reading(url) as connection:
                book = price_book.current_book(connection)
                assert book is not None
                asked = Filter(project_id="proj-1", since=start, until=end)
                lines = statements.usage(connection, book, asked, [By.HOUR, By.KEY, By.METER])
            return f"{len(lines)} lines of usage by hour, key and meter ({(end - start) // HOUR} hours)"

        seconds = timed("statement", month)
        timed("usage", by_hour)
        timed("reconciled", lambda: f"{len(reconcile(url, []).differences)} differences")
    right = seconds < LIMIT_S
    print("passed" if right else f"FAILED: the statement must take less than {LIMIT_S} s")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
