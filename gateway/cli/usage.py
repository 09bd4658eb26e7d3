"""`loopline usage`: what was used and what it costs, asked of the gateway."""

from datetime import datetime
from typing import Annotated, Any

import typer

from gateway.cli.common import (
    ApiKey,
    AsJson,
    BaseUrl,
    DataDir,
    dollars,
    fail,
    out,
    print_json,
    print_table,
    settings_of,
)
from gateway.cli.http import find_gateway
from gateway.core.ledger import UsageBy

_FIELDS = {
    UsageBy.HOUR: "start",
    UsageBy.DAY: "start",
    UsageBy.PROJECT: "project_id",
    UsageBy.KEY: "key_id",
    UsageBy.SESSION: "session_id",
    UsageBy.MODEL: "base_model",
    UsageBy.METER: "meter",
    UsageBy.TAG: "tag",
}
_USUAL = [UsageBy.KEY, UsageBy.SESSION, UsageBy.MODEL, UsageBy.METER]


def usage(
    session: Annotated[str | None, typer.Option(help="Only this session (its id or name).")] = None,
    since: Annotated[datetime | None, typer.Option(help="From this time on (UTC).")] = None,
    until: Annotated[datetime | None, typer.Option(help="Before this time (UTC).")] = None,
    by: Annotated[list[UsageBy] | None, typer.Option(help="Group by; may be given several times.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    data_dir: DataDir = None,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Show what was used and what it costs, up to now."""
    if as_csv and as_json:
        fail("--csv and --json exclude each other")
    gateway, groups = find_gateway(settings_of(data_dir), base_url, api_key), by or _USUAL
    asked: dict[str, Any] = {
        "session_id": session,
        "since": _utc(since),
        "until": _utc(until),
        "by": [one.value for one in groups],
    }
    if as_csv:
        typer.echo(gateway.get_text("/usage", **asked, format="csv"), nl=False)
        return
    answer = gateway.get("/usage", **asked)
    if as_json:
        print_json(answer)
        return
    rows = [
        (
            *(str(row[_FIELDS[one]] or "") for one in groups),
            f"{row['quantity']:,}",
            dollars(row["cost_nanos"]),
        )
        for row in answer["data"]
    ]
    columns = [*("base model" if one is UsageBy.MODEL else one.value for one in groups), "quantity", "cost"]
    print_table(columns, rows, empty="Nothing was used.", right=["quantity", "cost"])
    if rows:
        out().print(f"\nTotal {dollars(answer['total_cost_nanos'])}", highlight=False)


def _utc(moment: datetime | None) -> str | None:
    """Return the moment in ISO 8601; typer gives it without a zone, and it was said to be UTC."""
    return f"{moment.isoformat()}Z" if moment is not None else None
