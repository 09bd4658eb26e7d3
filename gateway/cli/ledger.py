"""`loopline ledger`: book a decision, print a month, prove the books. Directly in the database, for its operator."""

import secrets
from datetime import UTC, datetime
from typing import Annotated

import typer

from billing import ledger, reconcile, statements
from billing.accounts import Kind
from billing.moments import micros
from billing.money import format_usd, parse_usd
from gateway.cli.common import DataDir, dollars, fail, open_books, out, print_table, settings_of
from gateway.core.catalog import parse_catalog

app = typer.Typer(no_args_is_help=True, help="Credits, refunds, statements, reconciliation.")
Project = Annotated[str, typer.Argument(help="The project's id (`loopline keys list` shows it).")]
Amount = Annotated[str, typer.Argument(help="In dollars, at most nine decimals.")]
Reason = Annotated[str, typer.Option(help="Why; it stands on the statement.")]
Name = Annotated[str | None, typer.Option(help="Names the decision: the same name is booked once.")]


@app.command()
def credit(project: Project, amount: Amount, reason: Reason, name: Name = None, data_dir: DataDir = None) -> None:
    """Give a project money: it owes that much less."""
    _decide(Kind.CREDIT, project, -_positive(amount), reason, name, data_dir)


@app.command()
def refund(project: Project, amount: Amount, reason: Reason, name: Name = None, data_dir: DataDir = None) -> None:
    """Pay a project back what it was charged: it owes that much less."""
    _decide(Kind.REFUND, project, -_positive(amount), reason, name, data_dir)


@app.command()
def adjust(project: Project, amount: Amount, reason: Reason, name: Name = None, data_dir: DataDir = None) -> None:
    """Correct what a project owes, by a positive or (after --) a negative amount."""
    _decide(Kind.ADJUSTMENT, project, _nanos(amount), reason, name, data_dir)


@app.command()
def statement(
    project: Project, month: Annotated[str, typer.Argument(help="Such as 2026-01, UTC.")], data_dir: DataDir = None
) -> None:
    """Print a project's month, from the entries of its account alone."""
    try:
        with open_books(settings_of(data_dir)) as connection:
            found = statements.statement(connection, project, month)
    except ValueError as error:
        fail(str(error))
    rows = [
        (
            line.kind.value,
            line.base_model or "",
            line.meter,
            f"{line.quantity:,}",
            dollars(line.nanos),
            line.reason or "",
        )
        for line in found.lines
    ]
    out().print(f"Opening balance {dollars(found.opening_nanos)}", highlight=False)
    columns = ["kind", "base model", "meter", "quantity", "amount", "reason"]
    print_table(columns, rows, empty="Nothing was booked.", right=["quantity", "amount"])
    out().print(f"Closing balance {dollars(found.closing_nanos)}", highlight=False)


@app.command("reconcile")
def reconcile_(data_dir: DataDir = None) -> None:
    """Prove the books against everything they were made from; exit status 1 when something differs."""
    settings = settings_of(data_dir)
    arguments = ["--database", settings.resolved_database_url]
    if settings.resolved_catalog.exists():
        catalog = parse_catalog(settings.resolved_catalog.read_text(encoding="utf-8"))
        for url in sorted(url for model in catalog.models.values() for url in model.engines):
            arguments += ["--engine", url]
    raise typer.Exit(reconcile.main(arguments))


def _decide(kind: Kind, project: str, amount: int, reason: str, name: str | None, data_dir: DataDir) -> None:
    source = name or f"{kind.value}-{secrets.token_hex(8)}"
    try:
        with open_books(settings_of(data_dir), write=True) as connection:
            new = ledger.decide(
                connection,
                kind,
                project_id=project,
                amount=amount,
                reason=reason,
                source=source,
                at=micros(datetime.now(UTC)),
            )
            owed = ledger.balance(connection, project)
    except ValueError as error:
        fail(str(error))
    done = "booked" if new else "was booked already"
    out().print(f"{source} {done}; {project} owes {format_usd(owed)}.", highlight=False)


def _positive(amount: str) -> int:
    nanos = _nanos(amount)
    if nanos <= 0:
        fail("the amount must be positive")
    return nanos


def _nanos(amount: str) -> int:
    try:
        return parse_usd(amount)
    except ValueError as error:
        fail(str(error))
