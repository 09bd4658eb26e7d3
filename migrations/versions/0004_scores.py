"""Create scores."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "scores",
        sa.Column("id", sa.Text(), nullable=False, comment="scr-..."),
        sa.Column("project_id", sa.Text(), nullable=False, comment="Owner"),
        sa.Column("key_id", sa.Text(), nullable=False, comment="The key that asked"),
        sa.Column("session_id", sa.Text(), comment="The session it was asked of, if any"),
        sa.Column("base_model", sa.Text(), nullable=False, comment="Name in the catalogue"),
        sa.Column("version_id", sa.Text(), comment="The version that is asked; null: the base model"),
        sa.Column("status", sa.Text(), nullable=False, comment="Where it stands"),
        sa.Column("request_digest", sa.Text(), nullable=False, comment="Of the request, in its dialect's words"),
        sa.Column("payload_digest", sa.Text(), nullable=False, comment="What to score, in blobs"),
        sa.Column("outcome_digest", sa.Text(), comment="Its result or failure in blobs"),
        sa.Column("idempotency_key", sa.Text(), comment="Of the request"),
        sa.Column("attempts", sa.Integer(), nullable=False, comment="How often a trainer took it: fences its result"),
        sa.Column("created_at", sa.BigInteger(), nullable=False, comment="When acknowledged; kept 24 h"),
        sa.Column("started_at", sa.BigInteger(), comment="When a trainer last took it"),
        sa.Column("finished_at", sa.BigInteger(), comment="When it became final"),
        sa.Column("lease_owner", sa.Text(), comment="Trainer that computes it"),
        sa.Column("lease_until", sa.BigInteger(), comment="When another may take it"),
        sa.CheckConstraint(
            "status IN ('queued', 'running', 'completed', 'failed', 'skipped', 'cancelled')", name="ck_scores_status"
        ),
        sa.CheckConstraint(
            "(outcome_digest IS NOT NULL) = (status IN ('completed', 'failed'))", name="ck_scores_outcome"
        ),
        sa.CheckConstraint("(finished_at IS NULL) = (status IN ('queued', 'running'))", name="ck_scores_finished"),
        sa.CheckConstraint("(lease_owner IS NOT NULL) = (status = 'running')", name="ck_scores_lease_owner"),
        sa.CheckConstraint("(lease_until IS NOT NULL) = (status = 'running')", name="ck_scores_lease_until"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_scores_project_id"),
        sa.PrimaryKeyConstraint("id", name="pk_scores"),
    )
    op.create_index(
        "uq_scores_idempotency_key",
        "scores",
        ["project_id", "idempotency_key"],
        unique=True,
        sqlite_where=sa.text("idempotency_key IS NOT NULL"),
        postgresql_where=sa.text("idempotency_key IS NOT NULL"),
    )
    op.create_index(
        "ix_scores_open",
        "scores",
        ["base_model", "created_at"],
        sqlite_where=sa.text("status IN ('queued', 'running')"),
        postgresql_where=sa.text("status IN ('queued', 'running')"),
    )
    op.create_index("ix_scores_served", "scores", ["project_id", "started_at"])
    op.create_index("ix_scores_created_at", "scores", ["created_at"])
