"""Usage, statements and budgets: what was consumed, what it cost, and how much it may."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from gateway.core.ledger import UsageBy
from gateway.wire.native.schemas.base import Create, Read

Nanos = Annotated[int, Field(ge=0, lt=2**62)]
Format = Literal["json", "csv"]


class UsageRow(Read):
    """A sum over what was grouped by; null is what was not, or what has none. ``start`` is of an hour or a day."""

    start: datetime | None
    project_id: str | None
    key_id: str | None
    session_id: str | None
    base_model: str | None
    meter: str | None
    tag: str | None
    quantity: int
    cost_nanos: int


class UsageRead(Read):
    total_cost_nanos: int
    data: list[UsageRow]


class UsageQuery(BaseModel):
    """``by`` is what is grouped by: at most one of hour and day, and any of the others."""

    model_config = ConfigDict(extra="forbid")

    session_id: str | None = None
    since: AwareDatetime | None = None
    until: AwareDatetime | None = None
    by: Annotated[list[UsageBy], Field(max_length=len(UsageBy))] = [
        UsageBy.KEY,
        UsageBy.SESSION,
        UsageBy.MODEL,
        UsageBy.METER,
    ]
    format: Format = "json"


class StatementQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: Format = "json"


class StatementLineRead(Read):
    """Usage of one base model and meter, or a credit, refund or adjustment with its reason."""

    kind: str
    base_model: str | None
    meter: str
    reason: str | None
    quantity: int
    amount_nanos: int


class StatementRead(Read):
    """A UTC month: what was owed before it, its lines, what is owed at its end. Negative: what is left."""

    month: str
    opening_nanos: int
    lines: list[StatementLineRead]
    closing_nanos: int


class BudgetCreate(Create):
    """Nothing runs that could spend more than ``hard_nanos``; from ``soft_nanos`` on, answers warn. One is needed."""

    period: Literal["total", "month"] = "total"
    hard_nanos: Nanos | None = None
    soft_nanos: Nanos | None = None


class BudgetRead(Read):
    """``used_nanos`` is what was spent and what is held for work under way."""

    scope: str
    scope_id: str
    period: str
    hard_nanos: int | None
    soft_nanos: int | None
    used_nanos: int


class BudgetList(Read):
    data: list[BudgetRead]
