"""`loopline prices`: check a price list, and make it the one that counts."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from billing import price_book
from billing.prices import METERS, PriceList, PriceListError
from gateway.cli.common import AsJson, DataDir, dollars, fail, open_books, out, print_json, print_table, settings_of
from gateway.core.catalog import CatalogError, parse_catalog
from gateway.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Show, check and change prices.")
File = Annotated[Path, typer.Argument(help="The price list (TOML).", exists=True, dir_okay=False, readable=True)]


@app.command("list")
def list_prices(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Show the list that counts."""
    with open_books(settings_of(data_dir)) as connection:
        book = price_book.current_book(connection)
    if book is None:
        fail("no price list was applied yet: `loopline up` applies one at its first start")
    if as_json:
        rows = [
            {
                "base_model": price.base_model,
                "from": price.start.isoformat(),
                "until": price.end.isoformat() if price.end else None,
                **price.nanos_per_million,
            }
            for price in book.prices.prices
        ]
        print_json({"number": book.number, "prices": rows})
        return
    per_million = [f"{meter} / M" for meter in METERS]
    table = [
        (
            price.base_model,
            price.start.isoformat(),
            price.end.isoformat() if price.end else "",
            *(dollars(price.nanos_per_million[meter]) for meter in METERS),
        )
        for price in book.prices.prices
    ]
    print_table(["base model", "from", "until", *per_million], table, empty="No prices.", right=per_million)


@app.command()
def check(file: File, data_dir: DataDir = None) -> None:
    """Say whether a list could be applied now: no mistake in it, every base model covered, the past unchanged."""
    settings = settings_of(data_dir)
    prices = _read(file, settings)
    with open_books(settings) as connection:
        present = price_book.current_book(connection)
    if present is not None:
        try:
            price_book.check_change(present.prices, prices, at=datetime.now(UTC))
        except PriceListError as error:
            fail(f"{file}: {error}")
    out().print(f"{file} can be applied.", highlight=False)


@app.command()
def apply(file: File, data_dir: DataDir = None) -> None:
    """Make a list the one that counts. Running gateways follow within seconds; what is over keeps its price."""
    settings = settings_of(data_dir)
    _read(file, settings)
    try:
        with open_books(settings, write=True) as connection:
            book = price_book.apply(connection, file.read_text(encoding="utf-8"), at=datetime.now(UTC))
    except PriceListError as error:
        fail(f"{file}: {error}")
    out().print(f"{file} is price list {book.number}.", highlight=False)


def _read(file: Path, settings: Settings) -> PriceList:
    try:
        prices = PriceList.load(file)
        catalog = settings.resolved_catalog
        if catalog.exists():
            models = parse_catalog(catalog.read_text(encoding="utf-8")).models
            prices.check_covers(models, at=datetime.now(UTC))
    except (PriceListError, CatalogError) as error:
        fail(f"{file}: {error}")
    return prices
