"""The tables of limits: values that replace defaults, and the buckets of rates, which all gateways share."""

from sqlalchemy import BigInteger, CheckConstraint, Column, ForeignKey, Index, Table, Text
from sqlalchemy.schema import SchemaItem

from gateway.core.limits import Limit, LimitScope
from gateway.store.columns import one_of
from gateway.store.tables import metadata, projects


def _key(name: str) -> tuple[SchemaItem, ...]:
    """Return the columns that both tables are keyed by; ``name`` says what the third one holds."""
    return (
        Column("scope", Text, primary_key=True, comment="What it is of"),
        Column("scope_id", Text, primary_key=True, comment="Id of the project or key"),
        Column("name", Text, primary_key=True, comment=name),
        Column("project_id", Text, ForeignKey(projects.c.id), nullable=False, comment="Itself, or the key's"),
        one_of("scope", LimitScope),
        one_of("name", Limit),
    )


own_limits = Table(
    "own_limits",
    metadata,
    *_key("What is limited"),
    Column("value", BigInteger, nullable=False, comment="At most so many"),
    CheckConstraint("value > 0", name="value"),
    Index("ix_own_limits_project", "project_id"),
)

rate_buckets = Table(
    "rate_buckets",
    metadata,
    *_key("Which rate"),
    Column("full_at", BigInteger, nullable=False, comment="When it is full again, microseconds since 1970"),
)
