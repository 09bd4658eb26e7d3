"""Let projects and sessions take turns by tokens on a trainer; find what became final since a moment."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "turns",
        sa.Column("base_model", sa.Text(), nullable=False, comment="Whose trainer"),
        sa.Column("project_id", sa.Text(), nullable=False, comment="Who takes turns"),
        sa.Column("started", sa.BigInteger(), nullable=False, comment="Virtual time of its last turn, in tokens"),
        sa.Column("finished", sa.BigInteger(), nullable=False, comment="The same, with that turn's tokens"),
        sa.Column("session_started", sa.BigInteger(), nullable=False, comment="Of its sessions' last turn among them"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_turns_project_id"),
        sa.PrimaryKeyConstraint("base_model", "project_id", name="pk_turns"),
    )
    op.add_column("sessions", sa.Column("turn", sa.BigInteger(), comment="Virtual time of its last turn, with it"))
    op.create_index(
        "ix_operations_finished",
        "operations",
        ["finished_at"],
        sqlite_where=sa.text("finished_at IS NOT NULL"),
        postgresql_where=sa.text("finished_at IS NOT NULL"),
    )
