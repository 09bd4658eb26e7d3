"""The table of the audit log. Triggers refuse to change or delete what is in it."""

from sqlalchemy import Column, ForeignKey, Index, Table, Text

from gateway.store.columns import UtcMicros
from gateway.store.tables import metadata, projects

audit = Table(
    "audit",
    metadata,
    Column("id", Text, primary_key=True, comment="evt-..., sortable by time"),
    Column("at", UtcMicros, nullable=False, comment="When"),
    Column("project_id", Text, ForeignKey(projects.c.id), nullable=False, comment="Whose things"),
    Column("actor", Text, comment="The key; null: an operator at the command line"),
    Column("action", Text, nullable=False, comment="Method and route, or the command"),
    Column("subject", Text, nullable=False, comment="What it named, e.g. session_id=sess-..."),
    Column("request_id", Text, comment="Of the answer and the log lines"),
    Index("ix_audit_project", "project_id", "id"),
)
