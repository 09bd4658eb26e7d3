"""The ledger of one transaction: money is set aside before work, and what was consumed is priced and booked after."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Protocol

from gateway.core.ids import ProjectId, SessionId
from gateway.core.ledger import Budget, BudgetScope, BudgetStanding, Statement, UsageBy, UsageLine, WorstCase
from gateway.core.usage import UsageFact


class Ledger(Protocol):
    """Implemented by billing. A process without one (a trainer) only records usage facts."""

    @property
    def notices(self) -> Sequence[BudgetStanding]:
        """Soft limits that the holds of this transaction reached."""
        ...

    async def hold(self, work: WorstCase) -> None:
        """Set the most that ``work`` can cost aside; holding it again changes nothing.

        Raises:
            OutOfBudget: nothing was set aside.
        """
        ...

    async def settle(self, source: str, facts: Sequence[UsageFact]) -> None:
        """The work of ``source`` is done: hold what ``facts`` cost, nothing when there are none."""
        ...

    async def lose(self, source: str) -> None:
        """The work of ``source`` ended without a count: nobody pays for it, but its engine may have worked on it."""
        ...

    async def usage(
        self,
        by: Sequence[UsageBy],
        *,
        project_id: ProjectId | None,
        sessions: Collection[SessionId] | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> Sequence[UsageLine]:
        """Sum up what was consumed, to the moment, per combination of ``by``. ``since`` is inclusive, ``until`` not."""
        ...

    async def session_usage(self, sessions: Collection[SessionId]) -> Mapping[SessionId, UsageLine]:
        """Return the tokens and the cost of each session so far; none for one that consumed nothing."""
        ...

    async def statement(self, project_id: ProjectId, month: str) -> Statement:
        """Raises Invalid when ``month`` is not one (``2026-01``)."""
        ...

    async def budgets(self, project_id: ProjectId) -> Sequence[BudgetStanding]: ...

    async def set_budget(self, budget: Budget) -> None:
        """Raises Invalid: no limit at all."""
        ...

    async def remove_budget(self, project_id: ProjectId, scope: BudgetScope, scope_id: str) -> bool: ...
