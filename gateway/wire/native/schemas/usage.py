"""Usage: what was consumed, and what it cost."""

from pydantic import AwareDatetime, BaseModel, ConfigDict

from gateway.wire.native.schemas.base import Read


class UsageRow(Read):
    """A sum over one key, session, base model and meter."""

    key_id: str
    session_id: str | None
    base_model: str
    meter: str
    quantity: int
    cost_nanos: int


class UsageRead(Read):
    total_cost_nanos: int
    data: list[UsageRow]


class UsageQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    session_id: str | None = None
    since: AwareDatetime | None = None
    until: AwareDatetime | None = None
