"""`loopline usage`: the token bill, asked of the gateway."""

from datetime import datetime
from typing import Annotated

import typer

from gateway.cli.common import ApiKey, AsJson, BaseUrl, DataDir, dollars, out, print_json, print_table, settings_of
from gateway.cli.http import find_gateway


def usage(
    session: Annotated[str | None, typer.Option(help="Only this session (its id).")] = None,
    since: Annotated[datetime | None, typer.Option(help="From this time on (UTC).")] = None,
    until: Annotated[datetime | None, typer.Option(help="Before this time (UTC).")] = None,
    data_dir: DataDir = None,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Show what was used and what it costs, per key, session and meter."""
    gateway = find_gateway(settings_of(data_dir), base_url, api_key)
    answer = gateway.get("/usage", session_id=session, since=_utc(since), until=_utc(until))
    if as_json:
        print_json(answer)
        return
    rows = [
        (
            row["key_id"] or "",
            row["session_id"] or "",
            row["base_model"],
            row["meter"],
            f"{row['quantity']:,}",
            dollars(row["cost_nanos"]),
        )
        for row in answer["data"]
    ]
    columns = ["key", "session", "base model", "meter", "tokens", "cost"]
    print_table(columns, rows, empty="Nothing was used.", right=["tokens", "cost"])
    if rows:
        out().print(f"\nTotal {dollars(answer['total_cost_nanos'])}", highlight=False)


def _utc(moment: datetime | None) -> str | None:
    """Return the moment in ISO 8601; typer gives it without a zone, and it was said to be UTC."""
    return f"{moment.isoformat()}Z" if moment is not None else None
