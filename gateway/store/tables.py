"""The tables. What must never happen is forbidden here, by a constraint; ``migrations/`` creates them.

Every table of tenant data names its project. Ids are text (see ``core/ids.py``); moments are UTC microseconds.
Content (payloads, outcomes, answers) is in ``blobs`` and nowhere else.
"""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)

from gateway.core.operations import Status
from gateway.core.payloads import OperationKind
from gateway.core.sessions import OrderRule, SessionStatus
from gateway.core.usage import Meter
from gateway.store.columns import UtcMicros, lora_columns, one_of, partial_index

REVISION = "0016"  # of the newest migration, which makes these tables
LIVE = (SessionStatus.CREATING, SessionStatus.RUNNING, SessionStatus.STOPPING)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


projects = Table(
    "projects",
    metadata,
    Column("id", Text, primary_key=True, comment="proj-..."),
    Column("name", Text, nullable=False, comment="Chosen by the operator"),
    Column("created_at", UtcMicros, nullable=False, comment="When"),
    UniqueConstraint("name"),
)

keys = Table(
    "keys",
    metadata,
    Column("id", Text, primary_key=True, comment="20 characters; the secret is derived from it, never stored"),
    Column("project_id", Text, ForeignKey(projects.c.id), nullable=False, comment="What the key opens"),
    Column("name", Text, nullable=False, comment="Chosen by the operator"),
    Column("scopes", Text, nullable=False, comment="Words separated by one space, sorted"),
    Column("created_at", UtcMicros, nullable=False, comment="When"),
    Column("expires_at", UtcMicros, comment="Refused from then on; null: never"),
    Column("revoked_at", UtcMicros, comment="Refused from then on; null: not revoked"),
)

blobs = Table(
    "blobs",
    metadata,
    Column("project_id", Text, ForeignKey(projects.c.id), primary_key=True, comment="Whose content"),
    Column("digest", Text, primary_key=True, comment="Lower-case hex sha256 of the content"),
    Column("size_bytes", BigInteger, nullable=False, comment="Length of the content"),
    Column("content", LargeBinary, comment="The content; null: in a file named by project and digest"),
    Column("created_at", UtcMicros, nullable=False, comment="When first stored"),
    CheckConstraint("length(digest) = 64", name="digest"),
)

sessions = Table(
    "sessions",
    metadata,
    Column("id", Text, primary_key=True, comment="sess-..."),
    Column("project_id", Text, ForeignKey(projects.c.id), nullable=False, comment="Owner"),
    Column("key_id", Text, nullable=False, comment="The key that opened it"),
    Column("name", Text, comment="Unique among the project's live sessions"),
    Column("base_model", Text, nullable=False, comment="Name in the catalogue"),
    *lora_columns(),
    Column("group_name", Text, nullable=False, comment="Model package group that saves go to by default"),
    Column("order_rule", Text, nullable=False, comment="How its opener numbers operations"),
    Column("status", Text, nullable=False, comment="Where it stands in its life"),
    Column("recovering", Boolean, nullable=False, comment="A trainer is rebuilding its state"),
    Column("created_at", UtcMicros, nullable=False, comment="When"),
    Column("last_used_at", UtcMicros, nullable=False, comment="Idle expiry counts from here"),
    Column("ttl_s", Integer, comment="Seconds it may be idle; null: for ever"),
    Column("expires_at", UtcMicros, comment="last_used_at + ttl_s"),
    Column("user_metadata", JSON, nullable=False, comment="The opener's own labels"),
    Column("applied_seq", Integer, nullable=False, comment="Highest seq dealt with; never falls"),
    Column("optimizer_step", Integer, nullable=False, comment="Optimizer steps taken"),
    Column("window_broken_by", Integer, comment="Seq that is missing from the accumulated gradient"),
    Column("snapshot_seq", Integer, comment="Seq that the last snapshot contains"),
    Column("snapshot_location", Text, comment="Where the last snapshot is"),
    Column("latest_version_id", Text, comment="Version that the live session answers with"),
    Column("failure", Text, comment="Why it failed"),
    Column("idempotency_key", Text, comment="Of the request that opened it"),
    Column("request_digest", Text, nullable=False, comment="Of the request that opened it"),
    Column("epoch", Integer, nullable=False, comment="Fencing token: grows with every new holder"),
    Column("lease_owner", Text, comment="Trainer that holds it"),
    Column("lease_until", UtcMicros, comment="When the lease runs out"),
    Column("served_at", UtcMicros, comment="When a trainer last took one of its operations"),
    Column("lora_use_rslora", Boolean, comment="The scale is alpha / sqrt(rank); null: alpha / rank"),
    Column("recovered_seq", Integer, comment="How far the rebuild has come, while recovering"),
    Column("recovery_losses", Integer, comment="Trainers lost in a row while they rebuilt it; null: 0"),
    Column("compute_rules", JSON(none_as_null=True), comment="What its bits depend on; frozen at its first run"),
    Column("made_with", JSON(none_as_null=True), comment="What computed since the last snapshot"),
    Column("replay_note", Text, comment="How the last replay differed from the first run; null: it did not"),
    Column("client_id", Text, comment="The client that opened it, if one did"),
    Column("client_number", Integer, comment="That client's number for it"),
    Column("turn", BigInteger, comment="Virtual time of its last turn, with it"),
    Column("removed_at", UtcMicros, comment="When it was taken out of all lists; null: it was not"),
    one_of("status", SessionStatus),
    one_of("order_rule", OrderRule),
    CheckConstraint("applied_seq >= 0 AND optimizer_step >= 0 AND epoch >= 0", name="counters"),
    CheckConstraint("(snapshot_seq IS NULL) = (snapshot_location IS NULL)", name="snapshot"),
    CheckConstraint("(lease_owner IS NULL) = (lease_until IS NULL)", name="lease"),
    CheckConstraint("(ttl_s IS NULL) = (expires_at IS NULL)", name="expiry"),
    CheckConstraint("(status = 'failed') = (failure IS NOT NULL)", name="failure"),
    partial_index(
        "uq_sessions_live_name",
        "project_id",
        "name",
        where="name IS NOT NULL AND status IN ('creating', 'running', 'stopping')",
        unique=True,
    ),
    partial_index(
        "uq_sessions_idempotency_key", "project_id", "idempotency_key", where="idempotency_key IS NOT NULL", unique=True
    ),
    partial_index("uq_sessions_seat", "client_id", "client_number", where="client_id IS NOT NULL", unique=True),
    Index("ix_sessions_page", "project_id", "created_at", "id"),
    Index("ix_sessions_lease_owner", "lease_owner"),
    partial_index("ix_sessions_live", "base_model", "served_at", where="status IN ('creating', 'running', 'stopping')"),
)

operations = Table(
    "operations",
    metadata,
    Column("id", Text, primary_key=True, comment="op-..."),
    Column("session_id", Text, ForeignKey(sessions.c.id), nullable=False, comment="Whose work"),
    Column("project_id", Text, ForeignKey(projects.c.id), nullable=False, comment="The session's"),
    Column("key_id", Text, nullable=False, comment="The key that submitted it"),
    Column("seq", Integer, nullable=False, comment="Its place in the session"),
    Column("kind", Text, nullable=False, comment="What the payload is"),
    Column("status", Text, nullable=False, comment="Where it stands"),
    Column("staged", Boolean, nullable=False, comment="Dealt with by the trainer, waits for the publish gate"),
    Column("payload_digest", Text, nullable=False, comment="Its body in blobs"),
    Column("outcome_digest", Text, comment="Its result or failure in blobs"),
    Column("idempotency_key", Text, comment="Of the request that submitted it"),
    Column("attempts", Integer, nullable=False, comment="How often a trainer took it"),
    Column("created_at", UtcMicros, nullable=False, comment="When acknowledged"),
    Column("started_at", UtcMicros, comment="When a trainer first took it"),
    Column("finished_at", UtcMicros, comment="When it became final"),
    Column("window_discarded", Boolean, nullable=False, comment="Its gradient was thrown away unused: no replay"),
    Column("progress_done", Integer, comment="Datums computed, while it runs"),
    Column("progress_total", Integer, comment="Datums to compute"),
    Column("tokens", BigInteger, comment="Model-input tokens that it is billed for"),
    Column("traceparent", Text, comment="Of the request that submitted it; null: nobody traced"),
    one_of("status", Status),
    one_of("kind", OperationKind),
    CheckConstraint("seq BETWEEN 1 AND 2147483647", name="seq"),
    CheckConstraint("(outcome_digest IS NOT NULL) = (status IN ('completed', 'failed'))", name="outcome"),
    CheckConstraint("(finished_at IS NULL) = (status IN ('queued', 'running'))", name="finished"),
    CheckConstraint("status <> 'running' OR started_at IS NOT NULL", name="started"),
    CheckConstraint("NOT staged OR kind IN ('save_weights', 'save_state')", name="staged"),
    UniqueConstraint("session_id", "seq"),
    Index("ix_operations_payload_digest", "project_id", "payload_digest"),
    Index("ix_operations_outcome_digest", "project_id", "outcome_digest"),
    partial_index(
        "uq_operations_idempotency_key",
        "project_id",
        "idempotency_key",
        where="idempotency_key IS NOT NULL",
        unique=True,
    ),
    partial_index("uq_operations_running", "session_id", where="status = 'running' AND NOT staged", unique=True),
    partial_index("ix_operations_open", "session_id", "seq", where="status IN ('queued', 'running')"),
    partial_index("ix_operations_queued", "project_id", where="status = 'queued'"),
    partial_index("ix_operations_finished", "finished_at", where="finished_at IS NOT NULL"),
    partial_index("ix_operations_waiting", "created_at", where="status = 'queued'"),
)

usage_facts = Table(
    "usage_facts",
    metadata,
    Column("source", Text, primary_key=True, comment="Operation or sample that consumed it"),
    Column("meter", Text, primary_key=True, comment="What is counted"),
    Column("quantity", BigInteger, nullable=False, comment="Units of the meter"),
    Column("project_id", Text, ForeignKey(projects.c.id), nullable=False, comment="Who pays"),
    Column("key_id", Text, nullable=False, comment="The key that asked"),
    Column("session_id", Text, comment="The session, if any"),
    Column("version_id", Text, comment="The version that answered, if any"),
    Column("base_model", Text, nullable=False, comment="Name in the catalogue: decides the price"),
    Column("at", UtcMicros, nullable=False, comment="When: decides the price"),
    Column("tag", Text, comment="The customer's own label"),
    Column("engine", Text, comment="The engine that computed it"),
    one_of("meter", Meter),
    CheckConstraint("quantity > 0", name="quantity"),
    Index("ix_usage_facts_at", "project_id", "at"),
    partial_index("ix_usage_facts_engine", "engine", "at", where="engine IS NOT NULL"),
)

samples = Table(
    "samples",
    metadata,
    Column("id", Text, primary_key=True, comment="smp-..."),
    Column("project_id", Text, ForeignKey(projects.c.id), nullable=False, comment="Owner"),
    Column("idempotency_key", Text, nullable=False, comment="Of the request"),
    Column("request_digest", Text, nullable=False, comment="Of the request"),
    Column("content_digest", Text, nullable=False, comment="The answer in blobs"),
    Column("created_at", UtcMicros, nullable=False, comment="When answered; kept 24 h"),
    UniqueConstraint("project_id", "idempotency_key"),
)

scores = Table(
    "scores",
    metadata,
    Column("id", Text, primary_key=True, comment="scr-..."),
    Column("project_id", Text, ForeignKey(projects.c.id), nullable=False, comment="Owner"),
    Column("key_id", Text, nullable=False, comment="The key that asked"),
    Column("session_id", Text, comment="The session it was asked of, if any"),
    Column("base_model", Text, nullable=False, comment="Name in the catalogue"),
    Column("version_id", Text, comment="The version that is asked; null: the base model"),
    Column("status", Text, nullable=False, comment="Where it stands"),
    Column("request_digest", Text, nullable=False, comment="Of the request, in its dialect's words"),
    Column("payload_digest", Text, nullable=False, comment="What to score, in blobs"),
    Column("outcome_digest", Text, comment="Its result or failure in blobs"),
    Column("idempotency_key", Text, comment="Of the request"),
    Column("attempts", Integer, nullable=False, comment="How often a trainer took it: fences its result"),
    Column("created_at", UtcMicros, nullable=False, comment="When acknowledged; kept 24 h"),
    Column("started_at", UtcMicros, comment="When a trainer last took it"),
    Column("finished_at", UtcMicros, comment="When it became final"),
    Column("lease_owner", Text, comment="Trainer that computes it"),
    Column("lease_until", UtcMicros, comment="When another may take it"),
    one_of("status", Status),
    CheckConstraint("(outcome_digest IS NOT NULL) = (status IN ('completed', 'failed'))", name="outcome"),
    CheckConstraint("(finished_at IS NULL) = (status IN ('queued', 'running'))", name="finished"),
    CheckConstraint("(lease_owner IS NOT NULL) = (status = 'running')", name="lease_owner"),
    CheckConstraint("(lease_until IS NOT NULL) = (status = 'running')", name="lease_until"),
    partial_index(
        "uq_scores_idempotency_key", "project_id", "idempotency_key", where="idempotency_key IS NOT NULL", unique=True
    ),
    partial_index("ix_scores_open", "base_model", "created_at", where="status IN ('queued', 'running')"),
    Index("ix_scores_served", "project_id", "started_at"),
    Index("ix_scores_created_at", "created_at"),
)

locks = Table(
    "locks",
    metadata,
    Column("name", Text, primary_key=True, comment="What is done by one process at a time"),
    Column("owner", Text, nullable=False, comment="Who does it"),
    Column("expires_at", UtcMicros, nullable=False, comment="Free from then on"),
)
