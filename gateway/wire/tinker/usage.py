"""What was consumed, by the hour, and what is stored; quantities and costs are the ledger's."""

from datetime import datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Query

from gateway.core.errors import Invalid
from gateway.core.ids import SessionId
from gateway.core.ledger import UsageBy, UsageLine
from gateway.core.usage import Meter
from gateway.wire.deps import Caller, Reading
from gateway.wire.tinker.listing_schemas import UsageQuery
from gateway.wire.tinker.routes import TinkerRoute
from gateway.wire.tinker.schemas import Document

router = APIRouter(route_class=TinkerRoute)

HOUR = timedelta(hours=1)
MAX_RANGE = timedelta(days=14)
_BY = (UsageBy.HOUR, UsageBy.KEY, UsageBy.SESSION, UsageBy.MODEL, UsageBy.METER)
_NANOS_PER_USD = 10**9


@router.get("/billing/usage/events")
async def usage_events(query: Annotated[UsageQuery, Query()], principal: Caller, unit: Reading) -> Document:
    """List the project's usage from ``starting_on`` to ``ending_before``, one event per hour, session and meter."""
    start, end = query.starting_on, query.ending_before
    if not (start < end <= start + MAX_RANGE) or start != _hour(start) or end != _hour(end):
        raise Invalid("starting_on and ending_before must be whole hours, at most 14 days apart", field="starting_on")
    lines = await unit.ledger.usage(_BY, project_id=principal.project_id, sessions=None, since=start, until=end)
    addresses: dict[str, str] = {}
    sessions: dict[str, Document] = {}
    for id in {line.group[UsageBy.SESSION] for line in lines}:
        if isinstance(id, str):
            session = await unit.sessions.get(principal.project_id, SessionId(id))
            addresses[id] = session.address
            sessions[session.address] = {"user_metadata": dict(session.user_metadata)}
    events = [_event(line, principal.project_id, addresses) for line in lines]
    return {"data": events, "sessions": sessions, "cost_data_through": None}


def _hour(moment: datetime) -> datetime:
    return moment.replace(minute=0, second=0, microsecond=0)


def _event(line: UsageLine, project_id: str, addresses: dict[str, str]) -> Document:
    start = line.group[UsageBy.HOUR]
    assert isinstance(start, datetime)
    return {
        "bucket_start": start.isoformat(),
        "bucket_end": (start + HOUR).isoformat(),
        "base_model": line.group[UsageBy.MODEL],
        "user_id": line.group[UsageBy.KEY],
        "session_id": addresses.get(str(line.group[UsageBy.SESSION])),
        "project_id": project_id,
        "estimated_cost_usd": line.nanos / _NANOS_PER_USD,
        "event_info": _info(Meter(str(line.group[UsageBy.METER])), line.quantity),
    }


def _info(meter: Meter, quantity: int) -> Document:
    match meter:
        case Meter.TRAIN:
            return {"type": "training", "token_count": quantity}
        case Meter.SAMPLE:
            return {"type": "sampling_sample", "token_count": quantity}
        case _:
            cached = meter is Meter.CACHED_PREFILL
            return {"type": "sampling_prefill", "cached": cached, "token_count": quantity}


@router.get("/billing/usage/checkpoints/current")
async def stored_now(principal: Caller, unit: Reading) -> Document:
    """Say how many versions the project has, and how many bytes they take."""
    groups = await unit.versions.groups(principal.project_id)
    size_bytes = sum(group.size_bytes for group in groups)
    return {
        "data": [
            {
                "project_id": principal.project_id,
                "checkpoint_count": sum(group.versions for group in groups),
                "size_bytes": size_bytes,
                "size_gigabytes": size_bytes / 10**9,
            }
        ]
    }
