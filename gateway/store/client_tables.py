"""The tables of programs, of what they open and make, and of samples that run in the background. See ``tables``."""

from sqlalchemy import JSON, CheckConstraint, Column, ForeignKey, Index, Integer, Table, Text, UniqueConstraint

from gateway.core.clients import Finish
from gateway.store.columns import UtcMicros, one_of
from gateway.store.tables import metadata, operations, projects, sessions
from gateway.store.version_tables import versions

clients = Table(
    "clients",
    metadata,
    Column("id", Text, primary_key=True, comment="client-..."),
    Column("project_id", Text, ForeignKey(projects.c.id), nullable=False, comment="Owner"),
    Column("key_id", Text, nullable=False, comment="The key that announced it"),
    Column("name", Text, comment="Its own words, for display"),
    Column("tags", JSON, nullable=False, comment="Its own labels, a list"),
    Column("user_metadata", JSON, nullable=False, comment="Its own labels, by name"),
    Column("created_at", UtcMicros, nullable=False, comment="When"),
    Column("seen_at", UtcMicros, nullable=False, comment="Its last sign of life"),
    Column("finished_at", UtcMicros, comment="When it said that it ended"),
    Column("finish", Text, comment="How it said that it ended"),
    Column("detail", Text, comment="Its own words about its end"),
    one_of("finish", Finish),
    CheckConstraint("(finish IS NULL) = (finished_at IS NULL)", name="finished"),
    Index("ix_clients_page", "project_id", "created_at", "id"),
)

running_samples = Table(
    "running_samples",
    metadata,
    Column("id", Text, primary_key=True, comment="smp-..., also of the answer"),
    Column("project_id", Text, ForeignKey(projects.c.id), nullable=False, comment="Owner"),
    Column("idempotency_key", Text, nullable=False, comment="Of the request"),
    Column("request_digest", Text, nullable=False, comment="Of the request"),
    Column("owner", Text, nullable=False, comment="The gateway that runs it"),
    Column("lease_until", UtcMicros, nullable=False, comment="Lost from then on"),
    UniqueConstraint("project_id", "idempotency_key"),
    Index("ix_running_samples_owner", "owner"),
    Index("ix_running_samples_lease_until", "lease_until"),
)

samplers = Table(
    "samplers",
    metadata,
    Column("client_id", Text, ForeignKey(clients.c.id), primary_key=True, comment="Whose handle"),
    Column("client_number", Integer, primary_key=True, comment="That client's number for it"),
    Column("project_id", Text, ForeignKey(projects.c.id), nullable=False, comment="The client's"),
    Column("base_model", Text, nullable=False, comment="Name in the catalogue"),
    Column("version_id", Text, ForeignKey(versions.c.id), comment="Pinned to this version"),
    Column("operation_id", Text, ForeignKey(operations.c.id), comment="Made by this save"),
    Column("session_id", Text, ForeignKey(sessions.c.id), comment="Follows the latest version of this session"),
    Column("copies", Integer, nullable=False, comment="Processes that joined the first one"),
    Column("created_at", UtcMicros, nullable=False, comment="When"),
    Index("ix_samplers_operation_id", "operation_id"),
)

custom_losses = Table(
    "custom_losses",
    metadata,
    Column("client_id", Text, ForeignKey(clients.c.id), primary_key=True, comment="Whose loss"),
    Column("client_number", Integer, primary_key=True, comment="That client's number for it"),
    Column("project_id", Text, ForeignKey(projects.c.id), nullable=False, comment="The client's"),
    Column("document_digest", Text, nullable=False, comment="The blob that holds its graph"),
    Column("created_at", UtcMicros, nullable=False, comment="When"),
)
