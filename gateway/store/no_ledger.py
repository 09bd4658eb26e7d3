"""The ledger of a process that keeps none (a trainer, the command line): it holds nothing and knows no money."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import NoReturn

from gateway.core.ids import ProjectId, SessionId
from gateway.core.ledger import Budget, BudgetScope, BudgetStanding, Statement, UsageBy, UsageLine, WorstCase
from gateway.core.usage import UsageFact
from gateway.store.transaction import Transaction


class NoLedger:
    """Ledger. Usage facts wait in the database until a gateway posts them."""

    def __init__(self, _: Transaction) -> None:
        self.notices: Sequence[BudgetStanding] = ()

    async def hold(self, work: WorstCase) -> None:
        return

    async def settle(self, source: str, facts: Sequence[UsageFact]) -> None:
        return

    async def lose(self, source: str) -> None:
        return

    async def usage(
        self,
        by: Sequence[UsageBy],
        *,
        project_id: ProjectId | None,
        sessions: Collection[SessionId] | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> Sequence[UsageLine]:
        _refuse()

    async def session_usage(self, sessions: Collection[SessionId]) -> Mapping[SessionId, UsageLine]:
        _refuse()

    async def statement(self, project_id: ProjectId, month: str) -> Statement:
        _refuse()

    async def budgets(self, project_id: ProjectId) -> Sequence[BudgetStanding]:
        _refuse()

    async def set_budget(self, budget: Budget) -> None:
        _refuse()

    async def remove_budget(self, project_id: ProjectId, scope: BudgetScope, scope_id: str) -> bool:
        _refuse()


def _refuse() -> NoReturn:
    raise RuntimeError("this process keeps no ledger")
