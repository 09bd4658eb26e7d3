"""What the gateway says to the ledger, and what it hears from it. Money is whole nano-USD."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from gateway.core.errors import GatewayError, Kind
from gateway.core.ids import KeyId, ProjectId, SessionId


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstCase:
    """The most a piece of work can consume, said before it starts.

    ``prompt``, ``sampled`` and ``trained`` tokens are what would be billed; ``engine_prompt`` and ``engine_sampled``
    what the engine's counters would count. ``source`` is the operation or sample. Work of the gateway itself ends with
    the process (``ours``); an operation does not, it is in the log.
    """

    source: str
    project_id: ProjectId
    key_id: KeyId
    session_id: SessionId | None
    base_model: str
    prompt: int = 0
    sampled: int = 0
    trained: int = 0
    engine_prompt: int = 0
    engine_sampled: int = 0
    ours: bool


class BudgetScope(StrEnum):
    """What a budget is of."""

    PROJECT = "project"
    KEY = "key"
    SESSION = "session"


class BudgetPeriod(StrEnum):
    """When a budget starts afresh: never, or with each month (UTC)."""

    TOTAL = "total"
    MONTH = "month"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Nothing runs that could pass ``hard_nanos``; from ``soft_nanos`` on, answers warn."""

    scope: BudgetScope
    scope_id: str
    project_id: ProjectId
    period: BudgetPeriod
    hard_nanos: int | None
    soft_nanos: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetStanding:
    """A budget and what is used of it: spent, and held for work under way."""

    budget: Budget
    used_nanos: int


class OutOfBudget(GatewayError):
    """The worst case of this request does not fit into what is left of a budget; nothing was executed."""

    kind = Kind.OUT_OF_BUDGET
    default_code = "insufficient_quota"


class UsageBy(StrEnum):
    """What usage may be grouped by."""

    HOUR = "hour"
    DAY = "day"
    PROJECT = "project"
    KEY = "key"
    SESSION = "session"
    MODEL = "model"
    METER = "meter"
    TAG = "tag"


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageLine:
    """A sum of usage. ``group`` says of what, for each dimension asked for; hours and days by their first moment."""

    group: Mapping[UsageBy, str | datetime | None]
    quantity: int
    nanos: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StatementLine:
    """Usage of one base model and meter, or (``kind`` credit, refund, adjustment) a decision with its ``reason``."""

    kind: str
    base_model: str | None
    meter: str
    reason: str | None
    quantity: int
    nanos: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A project's month: what it owed before it, its lines, what it owes at its end."""

    month: str
    opening_nanos: int
    lines: Sequence[StatementLine]
    closing_nanos: int
