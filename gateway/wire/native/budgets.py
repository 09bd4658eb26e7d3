"""Budgets of the project, its keys and its sessions."""

from fastapi import APIRouter, Response

from gateway.core.errors import NotFound
from gateway.core.ids import KeyId, ProjectId
from gateway.core.ledger import Budget, BudgetPeriod, BudgetScope, BudgetStanding
from gateway.core.ports import UnitOfWork
from gateway.wire.deps import AdminCaller, Caller, Reading, Writing
from gateway.wire.native.schemas.usage import BudgetCreate, BudgetList, BudgetRead
from gateway.wire.routes import DialectRoute
from gateway.wire.targets import find_session

router = APIRouter(route_class=DialectRoute, tags=["budgets"])


@router.get("/budgets")
async def list_budgets(principal: Caller, unit: Reading) -> BudgetList:
    """List the project's budgets with what is used of them."""
    return BudgetList(data=[_read(standing) for standing in await unit.ledger.budgets(principal.project_id)])


@router.put("/budgets/{scope}/{scope_id}")
async def set_budget(
    scope: BudgetScope, scope_id: str, body: BudgetCreate, principal: AdminCaller, unit: Writing
) -> BudgetRead:
    """Set the budget of the project, a key or a session. What is running goes on; what comes next must fit."""
    scope_id = await _owned(unit, principal.project_id, scope, scope_id)
    budget = Budget(
        scope=scope,
        scope_id=scope_id,
        project_id=principal.project_id,
        period=BudgetPeriod(body.period),
        hard_nanos=body.hard_nanos,
        soft_nanos=body.soft_nanos,
    )
    await unit.ledger.set_budget(budget)
    standings = await unit.ledger.budgets(principal.project_id)
    return next(_read(one) for one in standings if (one.budget.scope, one.budget.scope_id) == (scope, scope_id))


@router.delete("/budgets/{scope}/{scope_id}", status_code=204)
async def remove_budget(scope: BudgetScope, scope_id: str, principal: AdminCaller, unit: Writing) -> Response:
    """Lift a budget."""
    if not await unit.ledger.remove_budget(principal.project_id, scope, scope_id):
        raise NotFound("no such budget", code="unknown_budget", field="scope_id")
    return Response(status_code=204)


async def _owned(unit: UnitOfWork, project_id: ProjectId, scope: BudgetScope, scope_id: str) -> str:
    """Return the id of something that is the project's.

    Raises:
        NotFound: there is no such thing, or it is another project's.
    """
    match scope:
        case BudgetScope.PROJECT:
            known = scope_id == project_id
        case BudgetScope.KEY:
            key = await unit.keys.get(KeyId(scope_id))
            known = key is not None and key.project_id == project_id
        case BudgetScope.SESSION:
            return (await find_session(unit, project_id, scope_id)).id
    if not known:
        raise NotFound(f"no such {scope}, or not yours", code="unknown_budget_owner", field="scope_id")
    return scope_id


def _read(standing: BudgetStanding) -> BudgetRead:
    budget = standing.budget
    return BudgetRead(
        scope=budget.scope,
        scope_id=budget.scope_id,
        period=budget.period,
        hard_nanos=budget.hard_nanos,
        soft_nanos=budget.soft_nanos,
        used_nanos=standing.used_nanos,
    )
