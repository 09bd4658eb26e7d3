"""From an engine's counts to usage facts and their price."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from gateway.core.ids import SampleId, SessionId
from gateway.core.ports import Database, Prices, UnitOfWork
from gateway.core.principals import Principal
from gateway.core.sampling import Target, TokenCounts
from gateway.core.usage import Meter, UsageFact


def sampling_facts(
    counts: TokenCounts,
    *,
    sample_id: SampleId,
    principal: Principal,
    session_id: SessionId | None,
    target: Target,
    at: datetime,
) -> list[UsageFact]:
    """Return one fact per meter that counted anything."""
    quantities = {
        Meter.PREFILL: counts.prompt - counts.cached,
        Meter.CACHED_PREFILL: counts.cached,
        Meter.SAMPLE: counts.sampled,
    }
    return [
        UsageFact(
            source=sample_id,
            meter=meter,
            quantity=quantity,
            project_id=principal.project_id,
            key_id=principal.key_id,
            session_id=session_id,
            version_id=None if target.version is None else target.version.id,
            base_model=target.base.name,
            at=at,
        )
        for meter, quantity in quantities.items()
        if quantity > 0
    ]


async def record(unit: UnitOfWork, facts: Sequence[UsageFact], *, session_id: SessionId | None, at: datetime) -> None:
    """Add ``facts`` and mark the session as used. Recording the same facts again changes nothing."""
    if facts:
        await unit.usage.add(facts)
    if session_id is not None:
        await unit.sessions.touch(session_id, at)


async def record_alone(
    database: Database, facts: Sequence[UsageFact], *, session_id: SessionId | None, at: datetime
) -> None:
    """As ``record``, in a unit of its own: durable on return."""
    async with database.write() as unit:
        await record(unit, facts, session_id=session_id, at=at)


def cost_nanos(prices: Prices, facts: Iterable[UsageFact]) -> int:
    """Return the sum of the facts' prices in nano-USD, each at its own time."""
    return sum(
        prices.cost_nanos(base_model=fact.base_model, meter=fact.meter, quantity=fact.quantity, at=fact.at)
        for fact in facts
    )


def quantities(facts: Iterable[UsageFact]) -> Mapping[str, int]:
    return {fact.meter.value: fact.quantity for fact in facts}
