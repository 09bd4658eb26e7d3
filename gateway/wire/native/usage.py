"""What was consumed, and what it costs: live, and as a month's statement."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query, Response

from gateway.core.errors import Invalid
from gateway.core.ledger import Statement, UsageBy, UsageLine
from gateway.wire.deps import Caller, Reading
from gateway.wire.native.csv_text import Cell, Usd, csv_response
from gateway.wire.native.schemas.usage import (
    StatementLineRead,
    StatementQuery,
    StatementRead,
    UsageQuery,
    UsageRead,
    UsageRow,
)
from gateway.wire.routes import DialectRoute
from gateway.wire.targets import find_session

router = APIRouter(route_class=DialectRoute, tags=["usage"])


@router.get("/usage", response_model=UsageRead)
async def read_usage(query: Annotated[UsageQuery, Query()], principal: Caller, unit: Reading) -> UsageRead | Response:
    """Sum the project's usage up to now, grouped by ``by``, from ``since`` (inclusive) to ``until``.

    Each piece of usage is priced at its own time and rounded once to a whole nano-USD; sums are exact.
    """
    if {UsageBy.HOUR, UsageBy.DAY} <= set(query.by) or len(set(query.by)) != len(query.by):
        raise Invalid("by takes each dimension once, and one of hour and day", field="by")
    session = None
    if query.session_id is not None:
        session = await find_session(unit, principal.project_id, query.session_id)
    lines = await unit.ledger.usage(
        query.by,
        project_id=principal.project_id,
        sessions=None if session is None else [session.id],
        since=query.since,
        until=query.until,
    )
    if query.format == "csv":
        return _usage_csv(query.by, lines)
    return UsageRead(total_cost_nanos=sum(line.nanos for line in lines), data=[_row(line) for line in lines])


@router.get("/statements/{month}", response_model=StatementRead)
async def read_statement(
    month: str, query: Annotated[StatementQuery, Query()], principal: Caller, unit: Reading
) -> StatementRead | Response:
    """The project's bill of a UTC month (``2026-01``), from the entries of its account."""
    statement = await unit.ledger.statement(principal.project_id, month)
    if query.format == "csv":
        return _statement_csv(statement)
    return StatementRead(
        month=statement.month,
        opening_nanos=statement.opening_nanos,
        lines=[
            StatementLineRead(
                kind=line.kind,
                base_model=line.base_model,
                meter=line.meter,
                reason=line.reason,
                quantity=line.quantity,
                amount_nanos=line.nanos,
            )
            for line in statement.lines
        ],
        closing_nanos=statement.closing_nanos,
    )


def _row(line: UsageLine) -> UsageRow:
    start = line.group.get(UsageBy.HOUR) or line.group.get(UsageBy.DAY)
    return UsageRow(
        start=start if isinstance(start, datetime) else None,
        project_id=_text(line, UsageBy.PROJECT),
        key_id=_text(line, UsageBy.KEY),
        session_id=_text(line, UsageBy.SESSION),
        base_model=_text(line, UsageBy.MODEL),
        meter=_text(line, UsageBy.METER),
        tag=_text(line, UsageBy.TAG),
        quantity=line.quantity,
        cost_nanos=line.nanos,
    )


def _text(line: UsageLine, by: UsageBy) -> str | None:
    value = line.group.get(by)
    return value if isinstance(value, str) else None


def _usage_csv(by: Sequence[UsageBy], lines: Sequence[UsageLine]) -> Response:
    rows = [[*(line.group[one] for one in by), line.quantity, Usd(line.nanos)] for line in lines]
    return csv_response([*(one.value for one in by), "quantity", "cost_usd"], rows)


def _statement_csv(statement: Statement) -> Response:
    rows: list[list[Cell]] = [
        [line.kind, line.base_model, line.meter, line.reason, line.quantity, Usd(line.nanos)]
        for line in statement.lines
    ]
    opening: list[Cell] = ["opening balance", None, None, None, None, Usd(statement.opening_nanos)]
    closing: list[Cell] = ["closing balance", None, None, None, None, Usd(statement.closing_nanos)]
    return csv_response(["kind", "base_model", "meter", "reason", "quantity", "amount_usd"], [opening, *rows, closing])
