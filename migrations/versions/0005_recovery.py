"""Record what a session is computed by, how far its recovery has come, and what a replay was like."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for column in (
        sa.Column("recovered_seq", sa.Integer(), comment="How far the rebuild has come, while recovering"),
        sa.Column("recovery_losses", sa.Integer(), comment="Trainers lost in a row while they rebuilt it; null: 0"),
        sa.Column(
            "compute_rules", sa.JSON(none_as_null=True), comment="What its bits depend on; frozen at its first run"
        ),
        sa.Column("made_with", sa.JSON(none_as_null=True), comment="What computed since the last snapshot"),
        sa.Column(
            "replay_note", sa.Text(), comment="How the last replay differed from the first run; null: it did not"
        ),
    ):
        op.add_column("sessions", column)
    for column in ("payload_digest", "outcome_digest"):
        op.create_index(f"ix_operations_{column}", "operations", ["project_id", column])
