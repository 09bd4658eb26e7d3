"""Tell billing when the files of a version were removed: storage is billed until then."""

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("DROP VIEW usage_source_versions")
    op.execute(
        "CREATE VIEW usage_source_versions AS "
        "SELECT id, project_id, base_model, size_bytes, created_at, purged_at AS removed_at FROM versions"
    )
