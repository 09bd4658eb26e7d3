"""`loopline budgets`: how much a project, a key or a session may spend; asked of the gateway."""

from typing import Annotated

import typer

from billing.money import parse_usd
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
from gateway.core.ledger import BudgetPeriod, BudgetScope

app = typer.Typer(no_args_is_help=True, help="Set, list and lift budgets.")
Scope = Annotated[BudgetScope, typer.Argument(help="What it is of.")]
ScopeId = Annotated[str, typer.Argument(help="The id of the project, key or session.")]


@app.command("list")
def list_budgets(
    data_dir: DataDir = None, base_url: BaseUrl = None, api_key: ApiKey = None, as_json: AsJson = False
) -> None:
    """List the project's budgets and what is used of them."""
    answer = find_gateway(settings_of(data_dir), base_url, api_key).get("/budgets")
    if as_json:
        print_json(answer)
        return
    rows = [
        (
            row["scope"],
            row["scope_id"],
            row["period"],
            dollars(row["used_nanos"]),
            "" if row["soft_nanos"] is None else dollars(row["soft_nanos"]),
            "" if row["hard_nanos"] is None else dollars(row["hard_nanos"]),
        )
        for row in answer["data"]
    ]
    columns = ["scope", "id", "period", "used", "soft", "hard"]
    print_table(columns, rows, empty="No budgets.", right=["used", "soft", "hard"])


@app.command("set")
def set_budget(
    scope: Scope,
    scope_id: ScopeId,
    hard: Annotated[str | None, typer.Option(help="In dollars: nothing runs that could spend more.")] = None,
    soft: Annotated[str | None, typer.Option(help="In dollars: answers warn from here on.")] = None,
    period: Annotated[BudgetPeriod, typer.Option(help="When it starts afresh.")] = BudgetPeriod.TOTAL,
    data_dir: DataDir = None,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
) -> None:
    """Set a budget; it holds from the next request on."""
    body = {"period": period.value, "hard_nanos": _nanos(hard), "soft_nanos": _nanos(soft)}
    gateway = find_gateway(settings_of(data_dir), base_url, api_key)
    row = gateway.put(f"/budgets/{scope.value}/{scope_id}", body)
    out().print(f"Budget of {row['scope']} {row['scope_id']}: {dollars(row['used_nanos'])} used.", highlight=False)


@app.command()
def remove(
    scope: Scope, scope_id: ScopeId, data_dir: DataDir = None, base_url: BaseUrl = None, api_key: ApiKey = None
) -> None:
    """Lift a budget."""
    find_gateway(settings_of(data_dir), base_url, api_key).delete(f"/budgets/{scope.value}/{scope_id}")
    out().print(f"The {scope.value} {scope_id} has no budget any more.", highlight=False)


def _nanos(amount: str | None) -> int | None:
    try:
        return None if amount is None else parse_usd(amount)
    except ValueError as error:
        fail(str(error))
