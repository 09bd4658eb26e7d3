"""The tables of limits: values that replace defaults, and the buckets of rates, which all gateways share."""

from sqlalchemy import BigInteger, CheckConstraint, Column, ForeignKey, Index, Table, Text

from gateway.core.limits import Limit, LimitScope
from gateway.store.columns import one_of
from gateway.store.tables import metadata, projects

own_limits = Table(
    "own_limits",
    metadata,
    Column("scope", Text, primary_key=True, comment="What it is of"),
    Column("scope_id", Text, primary_key=True, comment="Id of the project or key"),
    Column("name", Text, primary_key=True, comment="What is limited"),
    Column("project_id", Text, ForeignKey(projects.c.id), nullable=False, comment="Itself, or the key's"),
    Column("value", BigInteger, nullable=False, comment="At most so many"),
    one_of("scope", LimitScope),
    one_of("name", Limit),
    CheckConstraint("value > 0", name="value"),
    Index("ix_own_limits_project", "project_id"),
)

rate_buckets = Table(
    "rate_buckets",
    metadata,
    Column("scope", Text, primary_key=True, comment="What it is of"),
    Column("scope_id", Text, primary_key=True, comment="Id of the project or key"),
    Column("name", Text, primary_key=True, comment="Which rate"),
    Column("project_id", Text, ForeignKey(projects.c.id), nullable=False, comment="Itself, or the key's"),
    Column("full_at", BigInteger, nullable=False, comment="When it is full again, microseconds since 1970"),
    one_of("scope", LimitScope),
    one_of("name", Limit),
)
