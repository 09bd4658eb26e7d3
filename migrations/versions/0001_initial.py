"""Create projects, keys, blobs, sessions, operations, versions, usage facts, samples and locks."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "locks",
        sa.Column("name", sa.Text(), nullable=False, comment="What is done by one process at a time"),
        sa.Column("owner", sa.Text(), nullable=False, comment="Who does it"),
        sa.Column("expires_at", sa.BigInteger(), nullable=False, comment="Free from then on"),
        sa.PrimaryKeyConstraint("name", name="pk_locks"),
    )
    op.create_table(
        "projects",
        sa.Column("id", sa.Text(), nullable=False, comment="proj-..."),
        sa.Column("name", sa.Text(), nullable=False, comment="Chosen by the operator"),
        sa.Column("created_at", sa.BigInteger(), nullable=False, comment="When"),
        sa.PrimaryKeyConstraint("id", name="pk_projects"),
        sa.UniqueConstraint("name", name="uq_projects_name"),
    )
    op.create_table(
        "blobs",
        sa.Column("project_id", sa.Text(), nullable=False, comment="Whose content"),
        sa.Column("digest", sa.Text(), nullable=False, comment="Lower-case hex sha256 of the content"),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False, comment="Length of the content"),
        sa.Column(
            "content",
            sa.LargeBinary(),
            nullable=True,
            comment="The content; null: in a file named by project and digest",
        ),
        sa.Column("created_at", sa.BigInteger(), nullable=False, comment="When first stored"),
        sa.CheckConstraint("length(digest) = 64", name="ck_blobs_digest"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_blobs_project_id"),
        sa.PrimaryKeyConstraint("project_id", "digest", name="pk_blobs"),
    )
    op.create_table(
        "keys",
        sa.Column(
            "id", sa.Text(), nullable=False, comment="20 characters; the secret is derived from it, never stored"
        ),
        sa.Column("project_id", sa.Text(), nullable=False, comment="What the key opens"),
        sa.Column("name", sa.Text(), nullable=False, comment="Chosen by the operator"),
        sa.Column("scopes", sa.Text(), nullable=False, comment="Words separated by one space, sorted"),
        sa.Column("created_at", sa.BigInteger(), nullable=False, comment="When"),
        sa.Column("expires_at", sa.BigInteger(), nullable=True, comment="Refused from then on; null: never"),
        sa.Column("revoked_at", sa.BigInteger(), nullable=True, comment="Refused from then on; null: not revoked"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_keys_project_id"),
        sa.PrimaryKeyConstraint("id", name="pk_keys"),
    )
    op.create_table(
        "model_package_groups",
        sa.Column("project_id", sa.Text(), nullable=False, comment="Owner"),
        sa.Column("name", sa.Text(), nullable=False, comment="1 to 63 characters of a-z, A-Z, 0-9, '-'"),
        sa.Column("versions", sa.Integer(), nullable=False, comment="How many there are: the highest number"),
        sa.Column("created_at", sa.BigInteger(), nullable=False, comment="When"),
        sa.CheckConstraint("versions >= 0", name="ck_model_package_groups_versions"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_model_package_groups_project_id"),
        sa.PrimaryKeyConstraint("project_id", "name", name="pk_model_package_groups"),
    )
    op.create_table(
        "samples",
        sa.Column("id", sa.Text(), nullable=False, comment="smp-..."),
        sa.Column("project_id", sa.Text(), nullable=False, comment="Owner"),
        sa.Column("idempotency_key", sa.Text(), nullable=False, comment="Of the request"),
        sa.Column("request_digest", sa.Text(), nullable=False, comment="Of the request"),
        sa.Column("content_digest", sa.Text(), nullable=False, comment="The answer in blobs"),
        sa.Column("created_at", sa.BigInteger(), nullable=False, comment="When answered; kept 24 h"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_samples_project_id"),
        sa.PrimaryKeyConstraint("id", name="pk_samples"),
        sa.UniqueConstraint("project_id", "idempotency_key", name="uq_samples_project_id_idempotency_key"),
    )
    op.create_table(
        "sessions",
        sa.Column("id", sa.Text(), nullable=False, comment="sess-..."),
        sa.Column("project_id", sa.Text(), nullable=False, comment="Owner"),
        sa.Column("key_id", sa.Text(), nullable=False, comment="The key that opened it"),
        sa.Column("name", sa.Text(), nullable=True, comment="Unique among the project's live sessions"),
        sa.Column("base_model", sa.Text(), nullable=False, comment="Name in the catalogue"),
        sa.Column("lora_rank", sa.Integer(), nullable=False, comment="Rank of the A and B matrices"),
        sa.Column("lora_alpha", sa.Float(), nullable=False, comment="alpha / rank is the scale"),
        sa.Column("lora_train_attn", sa.Boolean(), nullable=False, comment="Attention projections train"),
        sa.Column("lora_train_mlp", sa.Boolean(), nullable=False, comment="MLP projections train"),
        sa.Column("lora_train_unembed", sa.Boolean(), nullable=False, comment="The unembedding trains"),
        sa.Column("lora_seed", sa.BigInteger(), nullable=False, comment="Seed of the initial A matrices"),
        sa.Column("group_name", sa.Text(), nullable=False, comment="Model package group that saves go to by default"),
        sa.Column("order_rule", sa.Text(), nullable=False, comment="How its opener numbers operations"),
        sa.Column("status", sa.Text(), nullable=False, comment="Where it stands in its life"),
        sa.Column("recovering", sa.Boolean(), nullable=False, comment="A trainer is rebuilding its state"),
        sa.Column("created_at", sa.BigInteger(), nullable=False, comment="When"),
        sa.Column("last_used_at", sa.BigInteger(), nullable=False, comment="Idle expiry counts from here"),
        sa.Column("ttl_s", sa.Integer(), nullable=True, comment="Seconds it may be idle; null: for ever"),
        sa.Column("expires_at", sa.BigInteger(), nullable=True, comment="last_used_at + ttl_s"),
        sa.Column("user_metadata", sa.JSON(), nullable=False, comment="The opener's own labels"),
        sa.Column("applied_seq", sa.Integer(), nullable=False, comment="Highest seq dealt with; never falls"),
        sa.Column("optimizer_step", sa.Integer(), nullable=False, comment="Optimizer steps taken"),
        sa.Column(
            "window_broken_by", sa.Integer(), nullable=True, comment="Seq that is missing from the accumulated gradient"
        ),
        sa.Column("snapshot_seq", sa.Integer(), nullable=True, comment="Seq that the last snapshot contains"),
        sa.Column("snapshot_location", sa.Text(), nullable=True, comment="Where the last snapshot is"),
        sa.Column("latest_version_id", sa.Text(), nullable=True, comment="Version that the live session answers with"),
        sa.Column("failure", sa.Text(), nullable=True, comment="Why it failed"),
        sa.Column("idempotency_key", sa.Text(), nullable=True, comment="Of the request that opened it"),
        sa.Column("request_digest", sa.Text(), nullable=False, comment="Of the request that opened it"),
        sa.Column("epoch", sa.Integer(), nullable=False, comment="Fencing token: grows with every new holder"),
        sa.Column("lease_owner", sa.Text(), nullable=True, comment="Trainer that holds it"),
        sa.Column("lease_until", sa.BigInteger(), nullable=True, comment="When the lease runs out"),
        sa.Column(
            "served_at", sa.BigInteger(), nullable=True, comment="When a trainer last took one of its operations"
        ),
        sa.CheckConstraint("(status = 'failed') = (failure IS NOT NULL)", name="ck_sessions_failure"),
        sa.CheckConstraint("order_rule IN ('strict', 'ascending')", name="ck_sessions_order_rule"),
        sa.CheckConstraint(
            "status IN ('creating', 'running', 'stopping', 'stopped', 'failed', 'expired')", name="ck_sessions_status"
        ),
        sa.CheckConstraint("(lease_owner IS NULL) = (lease_until IS NULL)", name="ck_sessions_lease"),
        sa.CheckConstraint("(snapshot_seq IS NULL) = (snapshot_location IS NULL)", name="ck_sessions_snapshot"),
        sa.CheckConstraint("(ttl_s IS NULL) = (expires_at IS NULL)", name="ck_sessions_expiry"),
        sa.CheckConstraint("applied_seq >= 0 AND optimizer_step >= 0 AND epoch >= 0", name="ck_sessions_counters"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_sessions_project_id"),
        sa.PrimaryKeyConstraint("id", name="pk_sessions"),
    )
    op.create_index("ix_sessions_lease_owner", "sessions", ["lease_owner"], unique=False)
    op.create_index(
        "ix_sessions_live",
        "sessions",
        ["base_model", "served_at"],
        unique=False,
        sqlite_where=sa.text("status IN ('creating', 'running', 'stopping')"),
        postgresql_where=sa.text("status IN ('creating', 'running', 'stopping')"),
    )
    op.create_index("ix_sessions_page", "sessions", ["project_id", "created_at", "id"], unique=False)
    op.create_index(
        "uq_sessions_idempotency_key",
        "sessions",
        ["project_id", "idempotency_key"],
        unique=True,
        sqlite_where=sa.text("idempotency_key IS NOT NULL"),
        postgresql_where=sa.text("idempotency_key IS NOT NULL"),
    )
    op.create_index(
        "uq_sessions_live_name",
        "sessions",
        ["project_id", "name"],
        unique=True,
        sqlite_where=sa.text("name IS NOT NULL AND status IN ('creating', 'running', 'stopping')"),
        postgresql_where=sa.text("name IS NOT NULL AND status IN ('creating', 'running', 'stopping')"),
    )
    op.create_table(
        "usage_facts",
        sa.Column("source", sa.Text(), nullable=False, comment="Operation or sample that consumed the tokens"),
        sa.Column("meter", sa.Text(), nullable=False, comment="What is counted"),
        sa.Column("quantity", sa.BigInteger(), nullable=False, comment="Tokens"),
        sa.Column("project_id", sa.Text(), nullable=False, comment="Who pays"),
        sa.Column("key_id", sa.Text(), nullable=False, comment="The key that asked"),
        sa.Column("session_id", sa.Text(), nullable=True, comment="The session, if any"),
        sa.Column("version_id", sa.Text(), nullable=True, comment="The version that answered, if any"),
        sa.Column("base_model", sa.Text(), nullable=False, comment="Name in the catalogue: decides the price"),
        sa.Column("at", sa.BigInteger(), nullable=False, comment="When: decides the price"),
        sa.CheckConstraint("meter IN ('prefill', 'cached_prefill', 'sample', 'train')", name="ck_usage_facts_meter"),
        sa.CheckConstraint("quantity > 0", name="ck_usage_facts_quantity"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_usage_facts_project_id"),
        sa.PrimaryKeyConstraint("source", "meter", name="pk_usage_facts"),
    )
    op.create_index("ix_usage_facts_at", "usage_facts", ["project_id", "at"], unique=False)
    op.create_table(
        "operations",
        sa.Column("id", sa.Text(), nullable=False, comment="op-..."),
        sa.Column("session_id", sa.Text(), nullable=False, comment="Whose work"),
        sa.Column("project_id", sa.Text(), nullable=False, comment="The session's"),
        sa.Column("key_id", sa.Text(), nullable=False, comment="The key that submitted it"),
        sa.Column("seq", sa.Integer(), nullable=False, comment="Its place in the session"),
        sa.Column("kind", sa.Text(), nullable=False, comment="What the payload is"),
        sa.Column("status", sa.Text(), nullable=False, comment="Where it stands"),
        sa.Column(
            "staged", sa.Boolean(), nullable=False, comment="Dealt with by the trainer, waits for the publish gate"
        ),
        sa.Column("payload_digest", sa.Text(), nullable=False, comment="Its body in blobs"),
        sa.Column("outcome_digest", sa.Text(), nullable=True, comment="Its result or failure in blobs"),
        sa.Column("idempotency_key", sa.Text(), nullable=True, comment="Of the request that submitted it"),
        sa.Column("attempts", sa.Integer(), nullable=False, comment="How often a trainer took it"),
        sa.Column("created_at", sa.BigInteger(), nullable=False, comment="When acknowledged"),
        sa.Column("started_at", sa.BigInteger(), nullable=True, comment="When a trainer first took it"),
        sa.Column("finished_at", sa.BigInteger(), nullable=True, comment="When it became final"),
        sa.Column(
            "window_discarded", sa.Boolean(), nullable=False, comment="Its gradient was thrown away unused: no replay"
        ),
        sa.CheckConstraint("(finished_at IS NULL) = (status IN ('queued', 'running'))", name="ck_operations_finished"),
        sa.CheckConstraint(
            "(outcome_digest IS NOT NULL) = (status IN ('completed', 'failed'))", name="ck_operations_outcome"
        ),
        sa.CheckConstraint("NOT staged OR kind IN ('save_weights', 'save_state')", name="ck_operations_staged"),
        sa.CheckConstraint(
            "kind IN ('forward', 'forward_backward', 'optim_step', 'save_weights', 'save_state', 'load_state')",
            name="ck_operations_kind",
        ),
        sa.CheckConstraint("status <> 'running' OR started_at IS NOT NULL", name="ck_operations_started"),
        sa.CheckConstraint(
            "status IN ('queued', 'running', 'completed', 'failed', 'skipped', 'cancelled')",
            name="ck_operations_status",
        ),
        sa.CheckConstraint("seq BETWEEN 1 AND 2147483647", name="ck_operations_seq"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_operations_project_id"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name="fk_operations_session_id"),
        sa.PrimaryKeyConstraint("id", name="pk_operations"),
        sa.UniqueConstraint("session_id", "seq", name="uq_operations_session_id_seq"),
    )
    op.create_index(
        "ix_operations_open",
        "operations",
        ["session_id", "seq"],
        unique=False,
        sqlite_where=sa.text("status IN ('queued', 'running')"),
        postgresql_where=sa.text("status IN ('queued', 'running')"),
    )
    op.create_index(
        "ix_operations_waiting",
        "operations",
        ["created_at"],
        unique=False,
        sqlite_where=sa.text("status = 'queued'"),
        postgresql_where=sa.text("status = 'queued'"),
    )
    op.create_index(
        "uq_operations_idempotency_key",
        "operations",
        ["project_id", "idempotency_key"],
        unique=True,
        sqlite_where=sa.text("idempotency_key IS NOT NULL"),
        postgresql_where=sa.text("idempotency_key IS NOT NULL"),
    )
    op.create_index(
        "uq_operations_running",
        "operations",
        ["session_id"],
        unique=True,
        sqlite_where=sa.text("status = 'running' AND NOT staged"),
        postgresql_where=sa.text("status = 'running' AND NOT staged"),
    )
    op.create_table(
        "versions",
        sa.Column("id", sa.Text(), nullable=False, comment="ver-..."),
        sa.Column("project_id", sa.Text(), nullable=False, comment="Owner"),
        sa.Column("group_name", sa.Text(), nullable=False, comment="Model package group"),
        sa.Column("number", sa.Integer(), nullable=False, comment="1, 2, 3, ... within the group, without gaps"),
        sa.Column("kind", sa.Text(), nullable=False, comment="What the artefact holds"),
        sa.Column("state", sa.Text(), nullable=False, comment="How far it is trusted"),
        sa.Column("session_id", sa.Text(), nullable=False, comment="Where it was trained"),
        sa.Column("operation_id", sa.Text(), nullable=False, comment="The save that made it"),
        sa.Column("parent_id", sa.Text(), nullable=True, comment="The session's version before it"),
        sa.Column("base_model", sa.Text(), nullable=False, comment="Name in the catalogue"),
        sa.Column("lora_rank", sa.Integer(), nullable=False, comment="Rank of the A and B matrices"),
        sa.Column("lora_alpha", sa.Float(), nullable=False, comment="alpha / rank is the scale"),
        sa.Column("lora_train_attn", sa.Boolean(), nullable=False, comment="Attention projections train"),
        sa.Column("lora_train_mlp", sa.Boolean(), nullable=False, comment="MLP projections train"),
        sa.Column("lora_train_unembed", sa.Boolean(), nullable=False, comment="The unembedding trains"),
        sa.Column("lora_seed", sa.BigInteger(), nullable=False, comment="Seed of the initial A matrices"),
        sa.Column("seq", sa.Integer(), nullable=False, comment="Last operation that its weights contain"),
        sa.Column("optimizer_step", sa.Integer(), nullable=False, comment="Optimizer steps that its weights contain"),
        sa.Column("location", sa.Text(), nullable=False, comment="Directory of the artefact store"),
        sa.Column(
            "manifest_sha256", sa.Text(), nullable=False, comment="Hash of the manifest, which hashes every file"
        ),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False, comment="Size of its files together"),
        sa.Column("description", sa.Text(), nullable=False, comment="The user's words"),
        sa.Column("created_at", sa.BigInteger(), nullable=False, comment="When staged"),
        sa.Column("published_at", sa.BigInteger(), nullable=True, comment="When the gate let it through"),
        sa.Column("canary", sa.JSON(), nullable=True, comment="What the gate measured"),
        sa.CheckConstraint("(state = 'published') = (published_at IS NOT NULL)", name="ck_versions_published"),
        sa.CheckConstraint("kind IN ('adapter', 'merged', 'state')", name="ck_versions_kind"),
        sa.CheckConstraint("state IN ('staged', 'published', 'rejected')", name="ck_versions_state"),
        sa.CheckConstraint("length(manifest_sha256) = 64", name="ck_versions_manifest"),
        sa.CheckConstraint("number >= 1", name="ck_versions_number"),
        sa.ForeignKeyConstraint(["operation_id"], ["operations.id"], name="fk_versions_operation_id"),
        sa.ForeignKeyConstraint(["parent_id"], ["versions.id"], name="fk_versions_parent_id"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_versions_project_id"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name="fk_versions_session_id"),
        sa.PrimaryKeyConstraint("id", name="pk_versions"),
        sa.UniqueConstraint("location", name="uq_versions_location"),
        sa.UniqueConstraint("operation_id", name="uq_versions_operation_id"),
        sa.UniqueConstraint("project_id", "group_name", "number", name="uq_versions_project_id_group_name_number"),
    )
    op.create_index("ix_versions_page", "versions", ["project_id", "created_at", "id"], unique=False)
    op.create_index("ix_versions_session", "versions", ["session_id", "seq"], unique=False)
    op.create_index(
        "ix_versions_staged",
        "versions",
        ["created_at"],
        unique=False,
        sqlite_where=sa.text("state = 'staged'"),
        postgresql_where=sa.text("state = 'staged'"),
    )
