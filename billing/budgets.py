"""Budgets: how much a project, a key or a session may spend, in all or per month.

Used is what was posted plus what is held, read in one statement, so that what moves from one to the other is counted
once. Posted, held and the wish to spend more are compared while the budget's row is locked: callers that race for
the same money come one after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import ColumnElement, Connection, RowMapping, ScalarSelect, and_, bindparam, func, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from billing.database import is_postgres
from billing.moments import month_of
from billing.tables import budgets, holds, spend


class Scope(StrEnum):
    """What a budget is of."""

    PROJECT = "project"
    KEY = "key"
    SESSION = "session"


class Period(StrEnum):
    """When a budget starts afresh."""

    TOTAL = "total"
    MONTH = "month"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits in nano-USD: nothing runs that could pass ``hard``; from ``soft`` on, answers warn."""

    scope: Scope
    scope_id: str
    project_id: str
    period: Period
    hard_nanos: int | None
    soft_nanos: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A budget and how much of it is used: posted and held, in nano-USD."""

    budget: Budget
    used_nanos: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned:
    """A soft limit that is reached; ``first`` in this period."""

    budget: Budget
    used_nanos: int
    first: bool


class OverBudget(Exception):
    """The worst case does not fit into what is left; nothing was set aside."""

    def __init__(self, budget: Budget, used_nanos: int, needed_nanos: int) -> None:
        self.budget = budget
        self.used_nanos = used_nanos
        self.needed_nanos = needed_nanos
        super().__init__(f"budget of {budget.scope} {budget.scope_id}")


def set_budget(connection: Connection, budget: Budget) -> None:
    """Make ``budget`` the one of its scope.

    Raises:
        ValueError: no limit at all, or a negative one.
    """
    limits = [limit for limit in (budget.hard_nanos, budget.soft_nanos) if limit is not None]
    if not limits or min(limits) < 0:
        raise ValueError("a budget needs a hard or a soft limit, of at least 0")
    values = {
        "project_id": budget.project_id,
        "period": budget.period.value,
        "hard_nanos": budget.hard_nanos,
        "soft_nanos": budget.soft_nanos,
        "warned": None,
    }
    insert = (postgresql if is_postgres(connection) else sqlite).insert(budgets)
    row = {"scope": budget.scope.value, "scope_id": budget.scope_id, **values}
    connection.execute(
        insert.values(row).on_conflict_do_update(index_elements=[budgets.c.scope, budgets.c.scope_id], set_=values)
    )


def remove_budget(connection: Connection, scope: Scope, scope_id: str, *, project_id: str | None = None) -> bool:
    """Lift a budget; return whether there was one (of that project)."""
    condition = and_(budgets.c.scope == scope, budgets.c.scope_id == scope_id)
    if project_id is not None:
        condition = and_(condition, budgets.c.project_id == project_id)
    return bool(connection.execute(budgets.delete().where(condition)).rowcount)


def standings(connection: Connection, *, project_id: str | None, at: int) -> Sequence[Standing]:
    """Return all budgets (of one project) with what is used of them."""
    query = _USED.order_by(budgets.c.scope, budgets.c.scope_id)
    if project_id is not None:
        query = query.where(budgets.c.project_id == project_id)
    return [
        Standing(budget=_budget_of(row), used_nanos=int(row["used"]))
        for row in connection.execute(query, {"this_month": month_of(at)}).mappings()
    ]


def require_room(
    connection: Connection, *, project_id: str, key_id: str, session_id: str | None, amount: int, at: int
) -> list[Warned]:
    """Lock the budgets of the three until the transaction ends and check that ``amount`` more fits into each.

    Raises:
        OverBudget: it does not.
    """
    asked = {"project": project_id, "key": key_id, "session": session_id, "this_month": month_of(at)}
    if not connection.execute(_LOCKED, asked).all():
        return []
    warned: list[Warned] = []
    for row in connection.execute(_MINE, asked).mappings().all():
        budget, used = _budget_of(row), int(row["used"])
        if budget.hard_nanos is not None and used + amount > budget.hard_nanos:
            raise OverBudget(budget, used, amount)
        if budget.soft_nanos is not None and used + amount >= budget.soft_nanos:
            period = month_of(at) if budget.period is Period.MONTH else Period.TOTAL.value
            warned.append(Warned(budget=budget, used_nanos=used + amount, first=row["warned"] != period))
            if row["warned"] != period:
                connection.execute(
                    update(budgets)
                    .where(and_(budgets.c.scope == budget.scope, budgets.c.scope_id == budget.scope_id))
                    .values(warned=period)
                )
    return warned


def _posted() -> ScalarSelect[int]:
    this_period = or_(budgets.c.period == Period.TOTAL, spend.c.month == bindparam("this_month"))
    return (
        select(func.coalesce(func.sum(spend.c.nanos), 0))
        .where(and_(spend.c.scope == budgets.c.scope, spend.c.scope_id == budgets.c.scope_id, this_period))
        .scalar_subquery()
    )


def _held() -> ScalarSelect[int]:
    def of(scope: Scope, id: ColumnElement[str]) -> ColumnElement[bool]:
        return and_(budgets.c.scope == scope, id == budgets.c.scope_id)

    return (
        select(func.coalesce(func.sum(holds.c.amount), 0))
        .where(
            and_(
                holds.c.project_id == budgets.c.project_id,
                or_(
                    budgets.c.scope == Scope.PROJECT,
                    of(Scope.KEY, holds.c.key_id),
                    of(Scope.SESSION, holds.c.session_id),
                ),
            )
        )
        .scalar_subquery()
    )


# Asked with every call, so built once: building takes longer than running.
_OF_THREE = or_(*(and_(budgets.c.scope == scope, budgets.c.scope_id == bindparam(scope.value)) for scope in Scope))
_LOCKED = select(budgets.c.scope).where(_OF_THREE).order_by(budgets.c.scope, budgets.c.scope_id).with_for_update()
_USED = select(budgets, (_posted() + _held()).label("used"))
_MINE = _USED.where(_OF_THREE)


def _budget_of(row: RowMapping) -> Budget:
    return Budget(
        scope=Scope(row["scope"]),
        scope_id=row["scope_id"],
        project_id=row["project_id"],
        period=Period(row["period"]),
        hard_nanos=row["hard_nanos"],
        soft_nanos=row["soft_nanos"],
    )
