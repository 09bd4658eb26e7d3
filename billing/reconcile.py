"""``python -m billing.reconcile``: prove the ledger, or say what is wrong with it.

Re-derives every posting from the ``usage_source_*`` views and the price list it names, verifies the hash chain, the
balances, the spend that budgets read, training facts against the operation log, storage facts against the versions, and
the engines' counters. Needs nothing but the database (and, for living engines, their ``/metrics``).

Exit status 0: no difference. 1: differences, all listed. 2: it could not be done.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import httpx
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from billing import audit, engines
from billing.audit import Difference
from billing.database import reading
from billing.ledger import balances
from billing.moments import moment
from billing.money import format_usd

_QUIET_TRIES, _QUIET_PAUSE_S = 5, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was looked at, and what is wrong. ``waiting`` facts are recorded and not yet posted."""

    facts: int
    postings: int
    waiting: int
    owed_nanos: int
    engines: Sequence[str]
    differences: Sequence[Difference]


def reconcile(connection: Connection) -> Report:
    """Check everything that the database alone can prove, on one snapshot."""
    lists, differences = audit.read_lists(connection)
    books, unreadable = audit.read_books(connection, lists)
    differences += unreadable
    for check in (
        audit.check_price_lists(connection),
        audit.check_chain(books),
        audit.check_head(connection, books),
        audit.check_postings(books),
        audit.check_spend(connection, books),
        audit.check_balances(connection, books),
        audit.check_operations(connection, books),
        audit.check_storage(connection, books),
        audit.check_readings(connection),
    ):
        differences += check
    return Report(
        facts=len(books.facts),
        postings=len(books.rows),
        waiting=len(books.waiting),
        owed_nanos=sum(nanos for name, nanos in balances(connection).items() if name.startswith("project/")),
        engines=[
            f"{known.engine} (started {moment(known.started_at):%Y-%m-%d %H:%M:%S}): "
            f"{known.said.prompt} prompt and {known.said.generation} generated tokens"
            for known in engines.readings(connection)
        ],
        differences=differences,
    )


def compare_living(url: str, engine: str) -> tuple[str, Difference | None]:
    """Compare the counters of ``engine`` (an address) with its facts; one that is never quiet is not judged."""
    for attempt in range(_QUIET_TRIES):
        first = _counters(engine)
        if first is None:
            return f"{engine}: away, or no counters", None
        if first.unfinished == 0:
            with reading(url) as connection:
                said = engines.Tokens(prompt=first.prompt_tokens, generation=first.generation_tokens)
                surplus = said - engines.counted(connection, engine, since=first.started_at)
            if _counters(engine) == first and (surplus.none or attempt == _QUIET_TRIES - 1):
                return f"{engine}: {said.prompt} prompt and {said.generation} generated tokens", _drift(engine, surplus)
        time.sleep(_QUIET_PAUSE_S)
    return f"{engine}: busy, not judged", None


def _drift(engine: str, surplus: engines.Tokens) -> Difference | None:
    if surplus.none:
        return None
    return Difference(
        check="engines",
        where=engine,
        found=f"{-surplus.prompt:+d} prompt and {-surplus.generation:+d} generated tokens in facts beside its counters",
        expected="the same",
    )


def _counters(engine: str) -> engines.Counters | None:
    try:
        return engines.parse_counters(httpx.get(f"{engine}/metrics", timeout=5.0, trust_env=False).text)
    except httpx.HTTPError:
        return None


def run(url: str, living: Sequence[str]) -> Report:
    """Reconcile the database of ``url`` and the ``living`` engines, given by address."""
    with reading(url) as connection:
        report = reconcile(connection)
    compared = [compare_living(url, engine) for engine in living]
    return Report(
        facts=report.facts,
        postings=report.postings,
        waiting=report.waiting,
        owed_nanos=report.owed_nanos,
        engines=[*report.engines, *(line for line, _ in compared)],
        differences=[*report.differences, *(wrong for _, wrong in compared if wrong is not None)],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m billing.reconcile", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--database",
        default=os.environ.get("LOOPLINE_DATABASE_URL"),
        help="SQLAlchemy URL, e.g. sqlite:////var/lib/loopline.db [default: LOOPLINE_DATABASE_URL]",
    )
    parser.add_argument("--engine", action="append", default=[], metavar="URL", help="a living engine to compare with")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    if not options.database:
        parser.error("give --database or set LOOPLINE_DATABASE_URL")
    try:
        report = run(options.database, options.engine)
    except SQLAlchemyError as error:
        print(f"cannot read the books: {error.__cause__ or error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        _say(report)
    return 1 if report.differences else 0


def _say(report: Report) -> None:
    print(
        f"{report.facts} facts, {report.postings} postings, {report.waiting} facts waiting to be posted, "
        f"{format_usd(report.owed_nanos)} owed."
    )
    for line in report.engines:
        print(f"engine {line}")
    for wrong in report.differences:
        print(f"DIFFERENCE in {wrong.check}, {wrong.where}: found {wrong.found}; expected {wrong.expected}")
    print("No difference." if not report.differences else f"{len(report.differences)} differences.")


if __name__ == "__main__":
    sys.exit(main())
