"""Say that a gateway still works with a deleted version, so that no other removes its files."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "versions",
        sa.Column(
            "used_until", sa.BigInteger(), comment="Deleted, yet a gateway works with it: its files stay until then"
        ),
    )
