"""Keep the custom losses that clients made."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "custom_losses",
        sa.Column("client_id", sa.Text(), nullable=False, comment="Whose loss"),
        sa.Column("client_number", sa.Integer(), nullable=False, comment="That client's number for it"),
        sa.Column("project_id", sa.Text(), nullable=False, comment="The client's"),
        sa.Column("document_digest", sa.Text(), nullable=False, comment="The blob that holds its graph"),
        sa.Column("created_at", sa.BigInteger(), nullable=False, comment="When"),
        sa.ForeignKeyConstraint(["client_id"], ["clients.id"], name="fk_custom_losses_client_id"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_custom_losses_project_id"),
        sa.PrimaryKeyConstraint("client_id", "client_number", name="pk_custom_losses"),
    )
