"""From an engine's counts to usage facts, and from a call's worst case to what it did cost."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime

from gateway.core.clock import Clock
from gateway.core.costs import cost_nanos
from gateway.core.errors import GatewayError, Kind
from gateway.core.ids import SampleId, SessionId
from gateway.core.ledger import BudgetStanding, WorstCase
from gateway.core.ports import Database, Prices, UnitOfWork
from gateway.core.principals import Principal
from gateway.core.sampling import Stopped, Target, TokenCounts
from gateway.core.sessions import Session
from gateway.core.usage import TAG, Meter, UsageFact, house_facts
from gateway.wire.insisting import to_its_end

_REFUSED = frozenset({Kind.INVALID, Kind.NOT_FOUND, Kind.CONFLICT})  # an engine that refuses computes nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call to an engine: who asks, what answers, and what it may consume at most.

    ``prompt`` and ``sampled`` are what would be billed; engines count a prompt once per sequence. What is consumed is
    labelled with ``tag``, else with the session's own.
    """

    sample_id: SampleId
    principal: Principal
    session: Session | None
    target: Target
    tag: str | None
    prompt: int
    sampled: int
    engine_prompt: int
    engine_sampled: int
    scoring: bool = False  # the one token that an engine generates to score a prompt is nobody's bill
    rated: bool = True  # False: when it was let in, nothing limited the caller's tokens by the minute

    @property
    def session_id(self) -> SessionId | None:
        return None if self.session is None else self.session.id

    @property
    def tokens(self) -> int:
        """What is taken of the rate of tokens until it is known."""
        return self.prompt + self.sampled

    @property
    def worst_case(self) -> WorstCase:
        return WorstCase(
            source=self.sample_id,
            project_id=self.principal.project_id,
            key_id=self.principal.key_id,
            session_id=self.session_id,
            base_model=self.target.base.name,
            prompt=self.prompt,
            sampled=self.sampled,
            engine_prompt=self.engine_prompt,
            engine_sampled=self.engine_sampled,
            ours=True,
        )

    def facts(self, counts: TokenCounts, at: datetime) -> list[UsageFact]:
        """Return one fact per meter that counted anything, and what nobody pays for as facts of the house."""
        counts = counts.without_sampled() if self.scoring else counts
        version_id = None if self.target.version is None else self.target.version.id
        quantities = {
            Meter.PREFILL: counts.prompt - counts.cached,
            Meter.CACHED_PREFILL: counts.cached,
            Meter.SAMPLE: counts.sampled,
        }
        billed = [
            UsageFact(
                source=self.sample_id,
                meter=meter,
                quantity=quantity,
                project_id=self.principal.project_id,
                key_id=self.principal.key_id,
                session_id=self.session_id,
                version_id=version_id,
                base_model=self.target.base.name,
                at=at,
                tag=self.tag or (None if self.session is None else self.session.user_metadata.get(TAG)),
                engine=counts.engine,
            )
            for meter, quantity in quantities.items()
            if quantity > 0
        ]
        return billed + house_facts(
            source=f"{self.sample_id}-house",
            engine=counts.engine,
            prompt=counts.extra_prompt,
            sampled=counts.extra_sampled,
            base_model=self.target.base.name,
            version_id=version_id,
            at=at,
        )


async def hold(database: Database, call: Call) -> Sequence[BudgetStanding]:
    """Set aside the tokens that ``call`` can take at most, and their price; return the soft limits that are reached.

    Raises:
        OutOfBudget, RateLimited: nothing may be executed.
    """

    placed = False

    async def work(unit: UnitOfWork) -> Sequence[BudgetStanding]:
        nonlocal placed
        if call.rated:
            await unit.limits.reserve(call.principal.project_id, call.principal.key_id, call.tokens)
        await unit.ledger.hold(call.worst_case)
        placed = True
        return unit.ledger.notices

    try:
        return await database.jot(work)
    except asyncio.CancelledError:
        if placed:  # nobody will come for it; what was never taken is not given back
            await to_its_end(lambda: give_up(database, call, refused=True))
        raise


@asynccontextmanager
async def held(database: Database, call: Call, clock: Clock) -> AsyncGenerator[Sequence[BudgetStanding]]:
    """Hold for the length of a call. A call that fails costs nothing, one that was stopped what it had produced; one
    that ends well settles itself (``record``).

    Raises:
        OutOfBudget, RateLimited: nothing may be executed.
    """
    notices = await hold(database, call)
    try:
        yield notices
    except Stopped as stopped:
        now, counts = clock.now(), stopped.counts
        facts = [] if counts is None else call.facts(counts, now)
        await to_its_end(lambda: database.apply(lambda unit: record(unit, call, facts, at=now)))
        raise
    except BaseException as error:
        refused = isinstance(error, GatewayError) and error.kind in _REFUSED
        await to_its_end(lambda: give_up(database, call, refused=refused))
        raise


async def give_up(database: Database, call: Call, *, refused: bool) -> None:
    """Release the hold of a call that ended without a count; unless it was ``refused``, the engine may have worked."""
    await database.jot(lambda unit: write_off(unit, call, refused=refused))


async def write_off(unit: UnitOfWork, call: Call, *, refused: bool = False) -> None:
    """Give back all that was set aside for a call that nobody pays for; unless it was ``refused``, the engine may have
    worked."""
    if call.rated:
        await unit.limits.charge(call.principal.project_id, call.principal.key_id, -call.tokens)
    if refused:
        await unit.ledger.settle(call.sample_id, ())
    else:
        await unit.ledger.lose(call.sample_id)


async def record(unit: UnitOfWork, call: Call, facts: Sequence[UsageFact], at: datetime) -> None:
    """Add ``facts``, give back what was set aside and not used, and mark the session as used."""
    if facts:
        await unit.usage.add(facts)
    if call.rated:
        billed = sum(fact.quantity for fact in facts if fact.project_id == call.principal.project_id)
        await unit.limits.charge(call.principal.project_id, call.principal.key_id, billed - call.tokens)
    await unit.ledger.settle(call.sample_id, facts)
    if call.session_id is not None:
        await unit.sessions.touch(call.session_id, at)


def cost_headers(cost_nanos: int, notices: Sequence[BudgetStanding]) -> dict[str, str]:
    """Return the headers that say what an answer cost and which budgets run low."""
    return {"X-Loopline-Cost-Nanos": str(cost_nanos), **warning_headers(notices)}


async def paid_headers(unit: UnitOfWork, prices: Prices, source: str) -> dict[str, str]:
    """Return the header that says what ``source``, an operation or a sample, has cost."""
    return cost_headers(cost_nanos(prices, await unit.usage.of_source(source)), ())


def warning_headers(notices: Sequence[BudgetStanding]) -> dict[str, str]:
    """Return the header of reached soft limits, ``key ID: 900 of 1000 nano-USD``; nothing when there are none."""
    said = [
        f"{one.budget.scope} {one.budget.scope_id}: {one.used_nanos} of {one.budget.soft_nanos} nano-USD"
        for one in notices
    ]
    return {"X-Loopline-Budget-Warning": "; ".join(said)} if said else {}
