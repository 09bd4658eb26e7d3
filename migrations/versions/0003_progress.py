"""Record how far a running operation has come."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("operations", sa.Column("progress_done", sa.Integer(), comment="Datums computed, while it runs"))
    op.add_column("operations", sa.Column("progress_total", sa.Integer(), comment="Datums to compute"))
