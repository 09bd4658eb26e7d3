"""Create clients, their samplers and running samples; say which client opened a session."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "clients",
        sa.Column("id", sa.Text(), nullable=False, comment="client-..."),
        sa.Column("project_id", sa.Text(), nullable=False, comment="Owner"),
        sa.Column("key_id", sa.Text(), nullable=False, comment="The key that announced it"),
        sa.Column("name", sa.Text(), comment="Its own words, for display"),
        sa.Column("tags", sa.JSON(), nullable=False, comment="Its own labels, a list"),
        sa.Column("user_metadata", sa.JSON(), nullable=False, comment="Its own labels, by name"),
        sa.Column("created_at", sa.BigInteger(), nullable=False, comment="When"),
        sa.Column("seen_at", sa.BigInteger(), nullable=False, comment="Its last sign of life"),
        sa.Column("finished_at", sa.BigInteger(), comment="When it said that it ended"),
        sa.Column("finish", sa.Text(), comment="How it said that it ended"),
        sa.Column("detail", sa.Text(), comment="Its own words about its end"),
        sa.CheckConstraint("finish IN ('success', 'errored', 'interrupted')", name="ck_clients_finish"),
        sa.CheckConstraint("(finish IS NULL) = (finished_at IS NULL)", name="ck_clients_finished"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_clients_project_id"),
        sa.PrimaryKeyConstraint("id", name="pk_clients"),
    )
    op.create_index("ix_clients_page", "clients", ["project_id", "created_at", "id"])
    op.add_column("sessions", sa.Column("client_id", sa.Text(), comment="The client that opened it, if one did"))
    op.add_column("sessions", sa.Column("client_number", sa.Integer(), comment="That client's number for it"))
    op.create_index(
        "uq_sessions_seat",
        "sessions",
        ["client_id", "client_number"],
        unique=True,
        sqlite_where=sa.text("client_id IS NOT NULL"),
        postgresql_where=sa.text("client_id IS NOT NULL"),
    )
    op.create_table(
        "running_samples",
        sa.Column("id", sa.Text(), nullable=False, comment="smp-..., also of the answer"),
        sa.Column("project_id", sa.Text(), nullable=False, comment="Owner"),
        sa.Column("idempotency_key", sa.Text(), nullable=False, comment="Of the request"),
        sa.Column("request_digest", sa.Text(), nullable=False, comment="Of the request"),
        sa.Column("owner", sa.Text(), nullable=False, comment="The gateway that runs it"),
        sa.Column("lease_until", sa.BigInteger(), nullable=False, comment="Lost from then on"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_running_samples_project_id"),
        sa.PrimaryKeyConstraint("id", name="pk_running_samples"),
        sa.UniqueConstraint("project_id", "idempotency_key", name="uq_running_samples_project_id_idempotency_key"),
    )
    op.create_index("ix_running_samples_owner", "running_samples", ["owner"])
    op.create_index("ix_running_samples_lease_until", "running_samples", ["lease_until"])
    op.create_table(
        "samplers",
        sa.Column("client_id", sa.Text(), nullable=False, comment="Whose handle"),
        sa.Column("client_number", sa.Integer(), nullable=False, comment="That client's number for it"),
        sa.Column("project_id", sa.Text(), nullable=False, comment="The client's"),
        sa.Column("base_model", sa.Text(), nullable=False, comment="Name in the catalogue"),
        sa.Column("version_id", sa.Text(), comment="Pinned to this version"),
        sa.Column("operation_id", sa.Text(), comment="Made by this save"),
        sa.Column("session_id", sa.Text(), comment="Follows the latest version of this session"),
        sa.Column("copies", sa.Integer(), nullable=False, comment="Processes that joined the first one"),
        sa.Column("created_at", sa.BigInteger(), nullable=False, comment="When"),
        sa.ForeignKeyConstraint(["client_id"], ["clients.id"], name="fk_samplers_client_id"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_samplers_project_id"),
        sa.ForeignKeyConstraint(["version_id"], ["versions.id"], name="fk_samplers_version_id"),
        sa.ForeignKeyConstraint(["operation_id"], ["operations.id"], name="fk_samplers_operation_id"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name="fk_samplers_session_id"),
        sa.PrimaryKeyConstraint("client_id", "client_number", name="pk_samplers"),
    )
    op.create_index("ix_samplers_operation_id", "samplers", ["operation_id"])
