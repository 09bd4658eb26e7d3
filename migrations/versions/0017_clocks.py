"""Keep what the clocks of a machine's processes show."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "clocks",
        sa.Column("machine", sa.Text(), nullable=False, comment="Which, since which boot"),
        sa.Column("uptime", sa.BigInteger(), nullable=False, comment="Microseconds since that boot"),
        sa.Column("shown", sa.BigInteger(), nullable=False, comment="What its processes' clocks showed then"),
        sa.PrimaryKeyConstraint("machine", name="pk_clocks"),
    )
