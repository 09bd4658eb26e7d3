"""What was consumed, and what it costs."""

from typing import Annotated

from fastapi import APIRouter, Query

from gateway.wire.deps import Caller, ClockDep, PricesDep, Reading
from gateway.wire.native.schemas.usage import UsageQuery, UsageRead, UsageRow
from gateway.wire.routes import DialectRoute
from gateway.wire.targets import find_session

router = APIRouter(route_class=DialectRoute, tags=["usage"])


@router.get("/usage")
async def read_usage(
    query: Annotated[UsageQuery, Query()], principal: Caller, prices: PricesDep, clock: ClockDep, unit: Reading
) -> UsageRead:
    """Sum the project's usage per (key, session, base model, meter), from ``since`` (inclusive) to ``until``.

    Each sum is priced once, at today's price, and rounded once to a whole nano-USD, half to even.
    """
    session = None
    if query.session_id is not None:
        session = await find_session(unit, principal.project_id, query.session_id)
    totals = await unit.usage.totals(
        principal.project_id,
        session_id=None if session is None else session.id,
        since=query.since,
        until=query.until,
    )
    now = clock.now()
    rows = [
        UsageRow(
            key_id=total.key_id,
            session_id=total.session_id,
            base_model=total.base_model,
            meter=total.meter,
            quantity=total.quantity,
            cost_nanos=prices.cost_nanos(
                base_model=total.base_model, meter=total.meter, quantity=total.quantity, at=now
            ),
        )
        for total in totals
    ]
    return UsageRead(total_cost_nanos=sum(row.cost_nanos for row in rows), data=rows)
