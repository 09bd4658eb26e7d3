"""Create limits and the buckets of rates; index what waits of a project."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_SCOPES = "scope IN ('project', 'key')"
_NAMES = (
    "name IN ('requests_per_minute', 'tokens_per_minute', 'sessions', 'queued_operations', 'versions', 'stored_bytes', "
    "'body_bytes', 'n', 'max_tokens', 'stop', 'prompts')"
)


def upgrade() -> None:
    op.create_table(
        "own_limits",
        sa.Column("scope", sa.Text(), nullable=False, comment="What it is of"),
        sa.Column("scope_id", sa.Text(), nullable=False, comment="Id of the project or key"),
        sa.Column("name", sa.Text(), nullable=False, comment="What is limited"),
        sa.Column("project_id", sa.Text(), nullable=False, comment="Itself, or the key's"),
        sa.Column("value", sa.BigInteger(), nullable=False, comment="At most so many"),
        sa.CheckConstraint(_SCOPES, name="ck_own_limits_scope"),
        sa.CheckConstraint(_NAMES, name="ck_own_limits_name"),
        sa.CheckConstraint("value > 0", name="ck_own_limits_value"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_own_limits_project_id"),
        sa.PrimaryKeyConstraint("scope", "scope_id", "name", name="pk_own_limits"),
    )
    op.create_index("ix_own_limits_project", "own_limits", ["project_id"])
    op.create_table(
        "rate_buckets",
        sa.Column("scope", sa.Text(), nullable=False, comment="What it is of"),
        sa.Column("scope_id", sa.Text(), nullable=False, comment="Id of the project or key"),
        sa.Column("name", sa.Text(), nullable=False, comment="Which rate"),
        sa.Column("project_id", sa.Text(), nullable=False, comment="Itself, or the key's"),
        sa.Column("full_at", sa.BigInteger(), nullable=False, comment="When it is full again, microseconds since 1970"),
        sa.CheckConstraint(_SCOPES, name="ck_rate_buckets_scope"),
        sa.CheckConstraint(_NAMES, name="ck_rate_buckets_name"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_rate_buckets_project_id"),
        sa.PrimaryKeyConstraint("scope", "scope_id", "name", name="pk_rate_buckets"),
    )
    op.create_index(
        "ix_operations_queued",
        "operations",
        ["project_id"],
        sqlite_where=sa.text("status = 'queued'"),
        postgresql_where=sa.text("status = 'queued'"),
    )
