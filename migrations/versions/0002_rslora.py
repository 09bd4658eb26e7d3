"""Record the scale rule of sessions and versions: alpha / rank, or alpha / sqrt(rank) (rsLoRA)."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("sessions", "versions"):
        op.add_column(
            table,
            sa.Column("lora_use_rslora", sa.Boolean(), comment="The scale is alpha / sqrt(rank); null: alpha / rank"),
        )
