from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from billing.price_book import Book
from billing.prices import PriceList
from gateway.ledger import PriceSheet, ledger_factory
from gateway.store import open_database
from tests.billing.books import OWNER, PRICES, Books, open_books
from tests.store.bench import HandClock
from tests.store.conftest import (
    clock,
    postgres,
    postgres_url,
    shared_postgres_url,
    sqlite_template,
    sqlite_url,
    url,
)

__all__ = ["clock", "postgres", "postgres_url", "shared_postgres_url", "sqlite_template", "sqlite_url", "url"]


@pytest.fixture
async def books(url: str, tmp_path: Path, clock: HandClock) -> AsyncIterator[Books]:
    """A database with a ledger, a price list and one project; on SQLite and on PostgreSQL."""
    sheet = PriceSheet(Book(number=0, digest="", prices=PriceList.parse(PRICES)))
    factory = ledger_factory(sheet, clock, OWNER)
    async with open_database(url, blob_dir=tmp_path / "blobs", clock=clock, ledger=factory) as database:
        yield await open_books(database, clock, url, sheet)
