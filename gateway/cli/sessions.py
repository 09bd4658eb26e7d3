"""`loopline sessions`: what runs, asked of the gateway."""

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from gateway.cli.common import (
    ApiKey,
    AsJson,
    BaseUrl,
    DataDir,
    ago,
    ahead,
    dollars,
    out,
    print_json,
    print_table,
    settings_of,
)
from gateway.cli.http import Gateway, find_gateway

app = typer.Typer(no_args_is_help=True, help="List and stop training sessions.")

_PAGE = 100


@app.command("list")
def list_sessions(
    everything: Annotated[bool, typer.Option("--all", help="Also those that have ended.")] = False,
    data_dir: DataDir = None,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """List the sessions of the key's project, newest first."""
    gateway = find_gateway(settings_of(data_dir), base_url, api_key)
    live = ("creating", "running", "stopping")
    sessions = [session for session in _sessions(gateway) if everything or session["status"] in live]
    if as_json:
        print_json(sessions)
        return
    rows = [
        (
            session["id"],
            session["name"] or "",
            session["base_model"],
            session["status"],
            session["activity"],
            str(session["optimizer_step"]),
            session["latest_version"] or "",
            ago(session["last_used_at"]) if session["activity"] == "idle" else "",
            ahead(session["expires_at"]) if session["status"] in live else "",
            f"{session['tokens']:,}",
            dollars(session["cost_nanos"]),
        )
        for session in sessions
    ]
    facts = ("id", "name", "base model", "status", "activity", "steps", "latest version")
    columns = [*facts, "idle since", "expires", "tokens", "cost"]
    print_table(columns, rows, empty="No sessions.", right=["steps", "tokens", "cost"])


@app.command()
def stop(
    session: Annotated[str, typer.Argument(help="Id or name.")],
    data_dir: DataDir = None,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Stop a session: what is queued is skipped, what it has saved stays."""
    answer = find_gateway(settings_of(data_dir), base_url, api_key).delete(f"/sessions/{session}")
    if as_json:
        print_json(answer)
        return
    out().print(f"Session {answer['id']} is {answer['status']}.", highlight=False)


def _sessions(gateway: Gateway) -> Iterator[dict[str, Any]]:
    after: str | None = None
    while True:
        page = gateway.get("/sessions", limit=_PAGE, after=after)
        yield from page["data"]
        after = page["next"]
        if after is None:
            return
