"""Take ended sessions out of the lists; describe groups that have no version yet."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "sessions",
        sa.Column("removed_at", sa.BigInteger(), comment="When it was taken out of all lists; null: it was not"),
    )
    op.add_column("model_package_groups", sa.Column("description", sa.Text(), comment="Its owner's words; null: none"))
    op.add_column(
        "model_package_groups", sa.Column("user_metadata", sa.JSON(), comment="Its owner's labels; null: none")
    )
