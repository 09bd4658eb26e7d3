"""The registry of versions: labels, lineage, expiry and deletion, aliases, history, verdicts of the gate."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for column in (
        sa.Column("name", sa.Text(), comment="What its session calls it; null: nothing"),
        sa.Column("user_metadata", sa.JSON(), comment="The owner's own labels; null: none"),
        sa.Column("tags", sa.Text(), comment="Words between spaces, sorted, a space at both ends; null: none"),
        sa.Column("ttl_s", sa.Integer(), comment="Seconds after which it expires; null: never"),
        sa.Column("expires_at", sa.BigInteger(), comment="Answers nothing from then on; null: never"),
        sa.Column("deleted_at", sa.BigInteger(), comment="When it was deleted, or its expiry was noticed"),
        sa.Column("purged_at", sa.BigInteger(), comment="When its files were removed"),
        sa.Column("base_sha256", sa.Text(), comment="Hash of the base model's files; null: not recorded"),
        sa.Column("code_version", sa.Text(), comment="Release that trained it; null: not recorded"),
    ):
        op.add_column("versions", column)
    _partial_index("uq_versions_name", ["session_id", "kind", "name"], "name IS NOT NULL", unique=True)
    _partial_index("ix_versions_expiry", ["expires_at"], "deleted_at IS NULL AND expires_at IS NOT NULL")
    _partial_index("ix_versions_deleted", ["deleted_at"], "deleted_at IS NOT NULL AND purged_at IS NULL")
    op.create_table(
        "version_aliases",
        sa.Column("project_id", sa.Text(), nullable=False, comment="Owner"),
        sa.Column("group_name", sa.Text(), nullable=False, comment="Model package group"),
        sa.Column("alias", sa.Text(), nullable=False, comment="Never 'latest', which moves by itself"),
        sa.Column("version_id", sa.Text(), nullable=False, comment="What it names now"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_version_aliases_project_id"),
        sa.ForeignKeyConstraint(["version_id"], ["versions.id"], name="fk_version_aliases_version_id"),
        sa.PrimaryKeyConstraint("project_id", "group_name", "alias", name="pk_version_aliases"),
    )
    op.create_index("ix_version_aliases_version", "version_aliases", ["version_id"])
    op.create_table(
        "version_events",
        sa.Column("id", sa.Text(), nullable=False, comment="evt-..., in order of time"),
        sa.Column("version_id", sa.Text(), nullable=False, comment="To what it happened"),
        sa.Column("event", sa.Text(), nullable=False, comment="What happened"),
        sa.Column("alias", sa.Text(), comment="The alias that was set or taken away"),
        sa.Column("previous", sa.Integer(), comment="Number that the alias named before; null: none"),
        sa.Column("key_id", sa.Text(), comment="The key that asked for it; null: the gateway did it by itself"),
        sa.Column("at", sa.BigInteger(), nullable=False, comment="When"),
        sa.CheckConstraint(
            "event IN ('aliased', 'unaliased', 'edited', 'deleted', 'expired', 'undeleted', 'purged')",
            name="ck_version_events_event",
        ),
        sa.ForeignKeyConstraint(["version_id"], ["versions.id"], name="fk_version_events_version_id"),
        sa.PrimaryKeyConstraint("id", name="pk_version_events"),
    )
    op.create_index("ix_version_events_version", "version_events", ["version_id", "id"])
    op.create_table(
        "version_checks",
        sa.Column("version_id", sa.Text(), nullable=False, comment="What was judged"),
        sa.Column("engine", sa.Text(), nullable=False, comment="Where"),
        sa.Column("occasion", sa.Text(), nullable=False, comment="Why"),
        sa.Column("at", sa.BigInteger(), nullable=False, comment="When, the last time"),
        sa.Column("report", sa.JSON(), comment="What was measured; null: it failed"),
        sa.Column("failure", sa.Text(), comment="Why it failed; null: it passed"),
        sa.CheckConstraint("occasion IN ('publish', 'load', 'verify')", name="ck_version_checks_occasion"),
        sa.CheckConstraint("(report IS NULL) = (failure IS NOT NULL)", name="ck_version_checks_verdict"),
        sa.ForeignKeyConstraint(["version_id"], ["versions.id"], name="fk_version_checks_version_id"),
        sa.PrimaryKeyConstraint("version_id", "engine", name="pk_version_checks"),
    )


def _partial_index(name: str, columns: list[str], where: str, *, unique: bool = False) -> None:
    condition = sa.text(where)
    op.create_index(name, "versions", columns, unique=unique, sqlite_where=condition, postgresql_where=condition)
