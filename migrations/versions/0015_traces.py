"""Name an operation's trace, so that the trainer's part joins the request's."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "operations",
        sa.Column("traceparent", sa.Text(), comment="Of the request that submitted it; null: nobody traced"),
    )
