"""The command line, put together."""

import logging

import typer

from gateway import logs
from gateway.cli import budgets, db, keys, ledger, limits, models, prices, projects, sessions, versions
from gateway.cli.audit import audit
from gateway.cli.common import AsJson, out, print_json
from gateway.cli.doctor import doctor
from gateway.cli.serve import serve
from gateway.cli.up import up
from gateway.cli.usage import usage
from gateway.supervisor.machine import installed_version


def version(as_json: AsJson = False) -> None:
    """Show the version."""
    number = installed_version("loopline-server") or "unknown"
    if as_json:
        print_json({"version": number})
        return
    out().print(f"loopline {number}", highlight=False)


def create_cli() -> typer.Typer:
    """Return the whole command."""
    cli = typer.Typer(
        name="loopline",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        help="Live LoRA training sessions and OpenAI-compatible inference behind one port.",
    )
    cli.command()(up)
    cli.add_typer(keys.app, name="keys")
    cli.add_typer(projects.app, name="projects")
    cli.command()(audit)
    cli.add_typer(sessions.app, name="sessions")
    cli.add_typer(models.app, name="models")
    cli.add_typer(versions.app, name="versions")
    cli.command()(serve)
    cli.command()(usage)
    cli.add_typer(prices.app, name="prices")
    cli.add_typer(budgets.app, name="budgets")
    cli.add_typer(limits.app, name="limits")
    cli.add_typer(ledger.app, name="ledger")
    cli.add_typer(db.app, name="db")
    cli.command()(doctor)
    cli.command()(version)
    return cli


def main() -> None:
    """Run the command line and exit. What is logged goes to standard error, beside the result."""
    logs.configure(level=logging.WARNING)
    create_cli()()
