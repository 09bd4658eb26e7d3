"""What the commands share: options, settings, output for people and for machines, and one way to fail."""

import json
import sys
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from billing.database import reading, writing
from gateway.core.errors import Unavailable
from gateway.places import WrongSettings
from gateway.settings import Settings
from gateway.store import SqlDatabase, UnfitDatabase, check_schema, open_database, parse_url

_PIPE_WIDTH = 240

DataDir = Annotated[
    Path | None, typer.Option(help="Where database, models and logs are (default: .loopline, or LOOPLINE_DATA_DIR).")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
BaseUrl = Annotated[
    str | None,
    typer.Option(help="The gateway (default: the one that runs on this data directory).", envvar="LOOPLINE_BASE_URL"),
]
ApiKey = Annotated[
    str | None, typer.Option(help="An API key (default: the data directory's local key).", envvar="LOOPLINE_API_KEY")
]


def settings_of(data_dir: Path | None) -> Settings:
    """Read the settings from the environment; ``data_dir`` wins over it."""
    try:
        return Settings.read(data_dir)
    except WrongSettings as error:
        fail(str(error))


@asynccontextmanager
async def open_store(settings: Settings) -> AsyncGenerator[SqlDatabase]:
    """Open the database that the settings name; one that cannot be used ends the command with what to do."""
    try:
        async with open_database(
            settings.resolved_database_url,
            blob_dir=settings.blob_dir,
            allow_weak_durability=settings.allow_weak_durability,
        ) as database:
            yield database
    except (UnfitDatabase, Unavailable) as error:
        fail(str(error))


@contextmanager
def open_books(settings: Settings, *, write: bool = False) -> Generator[Connection]:
    """Open a connection of billing's own, as ``open_store``."""
    try:
        parse_url(settings.resolved_database_url)
        with (writing if write else reading)(settings.resolved_database_url) as connection:
            check_schema(connection)
            yield connection
    except UnfitDatabase as error:
        fail(str(error))
    except DBAPIError as error:
        fail(f"the database cannot be used: {str(error.orig).strip()}")


def out() -> Console:
    """Return the console for results; in a pipe its lines are as long as they need to be."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def note() -> Console:
    """Return the console for what is said beside the result (standard error)."""
    return Console(stderr=True)


def fail(message: str, *, status: int = 1) -> NoReturn:
    """Say what is wrong on standard error and exit."""
    note().print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)
    raise typer.Exit(status)


def print_json(value: Any) -> None:
    """Print a result for machines: one JSON document, nothing else."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str, right: Sequence[str] = ()
) -> None:
    """Print a result for people; ``right`` names the columns of numbers, ``empty`` is said when there are no rows."""
    console = out()
    if not rows:
        console.print(empty)
        return
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=column in ("id", *right))
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    console.print(table)


def ago(moment: datetime | str, now: datetime | None = None) -> str:
    """Return how long ago a moment was, in one unit: ``5 s ago``, ``3 h ago``."""
    then = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    seconds = int(((now or datetime.now(UTC)) - then).total_seconds())
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return f"{max(0, seconds)} s ago"


def ahead(moment: str | None, now: datetime | None = None) -> str:
    """Return in how long a moment is, in one unit: ``in 3 h``; ``never`` for None."""
    if moment is None:
        return "never"
    seconds = int((datetime.fromisoformat(moment) - (now or datetime.now(UTC))).total_seconds())
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"in {seconds // size} {unit}"
    return f"in {max(0, seconds)} s"


def dollars(nanos: int) -> str:
    """Return nano-USD as dollars, exactly, with at least two decimals: ``$0.000125``."""
    sign, nanos = ("-" if nanos < 0 else ""), abs(nanos)
    whole, fraction = divmod(nanos, 1_000_000_000)
    decimals = f"{fraction:09d}".rstrip("0").ljust(2, "0")
    return f"{sign}${whole:,}.{decimals}"
