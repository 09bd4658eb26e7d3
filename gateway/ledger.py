"""The Ledger port on ``billing``: the one place where the gateway's words become billing's."""

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta

import structlog

from billing import budgets, holds, statements
from billing.moments import micros, moment
from billing.money import ceiling_of, price_of
from billing.price_book import Book
from gateway.core.clock import Clock
from gateway.core.costs import cost_nanos, worst_cost_nanos
from gateway.core.errors import Invalid
from gateway.core.ids import ProjectId, SessionId
from gateway.core.ledger import (
    Budget,
    BudgetPeriod,
    BudgetScope,
    BudgetStanding,
    OutOfBudget,
    Statement,
    StatementLine,
    UsageBy,
    UsageLine,
    WorstCase,
)
from gateway.core.usage import UsageFact
from gateway.store.transaction import Transaction

HORIZON = timedelta(hours=1)  # a price that rises within it is what a hold reckons with


class PriceSheet:
    """The price list that counts, as this process last read it. Implements the core's ``Prices``."""

    def __init__(self, book: Book) -> None:
        self.book = book

    def cost_nanos(self, *, base_model: str, meter: str, quantity: int, at: datetime) -> int:
        return price_of(quantity, self.book.prices.rate(base_model, meter, at))

    def most_nanos(self, *, base_model: str, meter: str, quantity: int, at: datetime) -> int:
        return ceiling_of(quantity, self.book.prices.highest_rate(base_model, meter, at, at + HORIZON))


class BillingLedger:
    """Ledger of one transaction."""

    def __init__(self, transaction: Transaction, sheet: PriceSheet, clock: Clock, owner: str) -> None:
        self._transaction = transaction
        self._sheet = sheet
        self._clock = clock
        self._owner = owner
        self._log = structlog.stdlib.get_logger("gateway.ledger")
        self.notices: Sequence[BudgetStanding] = []

    async def hold(self, work: WorstCase) -> None:
        now = self._clock.now()
        hold = holds.Hold(
            source=work.source,
            project_id=work.project_id,
            key_id=work.key_id,
            session_id=work.session_id,
            base_model=work.base_model,
            prompt_tokens=work.engine_prompt,
            sample_tokens=work.engine_sampled,
            amount=worst_cost_nanos(self._sheet, work, at=now),
            owner=self._owner if work.ours else None,
            at=micros(now),
        )
        try:
            warned = await self._transaction.change(lambda connection: holds.open_hold(connection, hold))
        except budgets.OverBudget as error:
            raise _out_of_budget(error) from None
        self.notices = [
            *self.notices,
            *(BudgetStanding(budget=_to_core(one.budget), used_nanos=one.used_nanos) for one in warned),
        ]
        for one in warned:
            if one.first:
                budget = one.budget
                self._log.warning(
                    "budget_soft_limit",
                    scope=budget.scope.value,
                    scope_id=budget.scope_id,
                    used_nanos=one.used_nanos,
                    soft_nanos=budget.soft_nanos,
                )

    async def settle(self, source: str, facts: Sequence[UsageFact]) -> None:
        cost = cost_nanos(self._sheet, facts)
        if cost:
            await self._transaction.change(lambda connection: holds.settle(connection, source, cost))
        else:
            await self._transaction.change(lambda connection: holds.release(connection, source))

    async def lose(self, source: str) -> None:
        await self._transaction.change(lambda connection: holds.lose(connection, source))

    async def usage(
        self,
        by: Sequence[UsageBy],
        *,
        project_id: ProjectId | None,
        sessions: Collection[SessionId] | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> Sequence[UsageLine]:
        asked = statements.Filter(
            project_id=project_id,
            sessions=sessions,
            since=None if since is None else micros(since),
            until=None if until is None else micros(until),
        )
        dimensions = [statements.By(one.value) for one in by]
        lines = await self._transaction.look(
            lambda connection: statements.usage(connection, self._sheet.book, asked, dimensions)
        )
        return [
            UsageLine(
                group={UsageBy(dimension.value): _spoken(value) for dimension, value in line.group.items()},
                quantity=line.quantity,
                nanos=line.nanos,
            )
            for line in lines
        ]

    async def session_usage(self, sessions: Collection[SessionId]) -> Mapping[SessionId, UsageLine]:
        lines = await self.usage([UsageBy.SESSION], project_id=None, sessions=sessions)
        return {SessionId(str(line.group[UsageBy.SESSION])): line for line in lines}

    async def statement(self, project_id: ProjectId, month: str) -> Statement:
        try:
            found = await self._transaction.look(lambda connection: statements.statement(connection, project_id, month))
        except ValueError:
            raise Invalid("month must be written as 2026-01", field="month") from None
        return Statement(
            month=month,
            opening_nanos=found.opening_nanos,
            lines=[
                StatementLine(
                    kind=line.kind.value,
                    base_model=line.base_model,
                    meter=line.meter,
                    reason=line.reason,
                    quantity=line.quantity,
                    nanos=line.nanos,
                )
                for line in found.lines
            ],
            closing_nanos=found.closing_nanos,
        )

    async def budgets(self, project_id: ProjectId) -> Sequence[BudgetStanding]:
        at = micros(self._clock.now())
        found = await self._transaction.look(
            lambda connection: budgets.standings(connection, project_id=project_id, at=at)
        )
        return [BudgetStanding(budget=_to_core(one.budget), used_nanos=one.used_nanos) for one in found]

    async def set_budget(self, budget: Budget) -> None:
        ours = budgets.Budget(
            scope=budgets.Scope(budget.scope.value),
            scope_id=budget.scope_id,
            project_id=budget.project_id,
            period=budgets.Period(budget.period.value),
            hard_nanos=budget.hard_nanos,
            soft_nanos=budget.soft_nanos,
        )
        try:
            await self._transaction.change(lambda connection: budgets.set_budget(connection, ours))
        except ValueError as error:
            raise Invalid(str(error), field="hard_nanos") from None

    async def remove_budget(self, project_id: ProjectId, scope: BudgetScope, scope_id: str) -> bool:
        return await self._transaction.change(
            lambda connection: budgets.remove_budget(
                connection, budgets.Scope(scope.value), scope_id, project_id=project_id
            )
        )


def ledger_factory(sheet: PriceSheet, clock: Clock, owner: str) -> Callable[[Transaction], BillingLedger]:
    """Return what gives every transaction its ledger."""
    return lambda transaction: BillingLedger(transaction, sheet, clock, owner)


def _out_of_budget(error: budgets.OverBudget) -> OutOfBudget:
    budget = error.budget
    return OutOfBudget(
        f"the budget of this {budget.scope} does not cover what the request can cost: {error.needed_nanos} nano-USD "
        f"are needed, {max(0, (budget.hard_nanos or 0) - error.used_nanos)} of {budget.hard_nanos} are left",
        details={
            "scope": budget.scope.value,
            "scope_id": budget.scope_id,
            "period": budget.period.value,
            "limit": budget.hard_nanos or 0,
            "used": error.used_nanos,
            "needed": error.needed_nanos,
        },
    )


def _to_core(budget: budgets.Budget) -> Budget:
    return Budget(
        scope=BudgetScope(budget.scope.value),
        scope_id=budget.scope_id,
        project_id=ProjectId(budget.project_id),
        period=BudgetPeriod(budget.period.value),
        hard_nanos=budget.hard_nanos,
        soft_nanos=budget.soft_nanos,
    )


def _spoken(value: str | int | None) -> str | datetime | None:
    return moment(value) if isinstance(value, int) else value
