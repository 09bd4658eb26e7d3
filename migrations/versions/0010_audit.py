"""Create the audit log, append-only."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("id", sa.Text(), nullable=False, comment="evt-..., sortable by time"),
        sa.Column("at", sa.BigInteger(), nullable=False, comment="When"),
        sa.Column("project_id", sa.Text(), nullable=False, comment="Whose things"),
        sa.Column("actor", sa.Text(), comment="The key; null: an operator at the command line"),
        sa.Column("action", sa.Text(), nullable=False, comment="Method and route, or the command"),
        sa.Column("subject", sa.Text(), nullable=False, comment="What it named, e.g. session_id=sess-..."),
        sa.Column("request_id", sa.Text(), comment="Of the answer and the log lines"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_audit_project_id"),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
    )
    op.create_index("ix_audit_project", "audit", ["project_id", "id"])
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            "CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit "
            "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
        )
        op.execute("REVOKE UPDATE, DELETE, TRUNCATE ON audit FROM PUBLIC")
        return
    for verb in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER audit_refuses_{verb.lower()} BEFORE {verb} ON audit "
            "BEGIN SELECT RAISE(ABORT, 'audit is append-only'); END"
        )
