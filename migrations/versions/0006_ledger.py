"""Create the ledger: price lists, postings, budgets and holds, the inbox that new usage facts go to, and the views."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

APPEND_ONLY = ("usage_facts", "ledger_postings", "ledger_entries", "price_lists", "lost_calls")

VIEWS = {
    "usage_source_facts": "SELECT project_id, source, meter, quantity, engine, base_model, key_id, "
    "session_id, version_id, tag, at FROM usage_facts",
    "usage_source_operations": "SELECT o.id AS source, o.project_id, o.key_id, o.session_id, s.base_model, o.kind, "
    "o.status, o.tokens FROM operations o JOIN sessions s ON s.id = o.session_id UNION ALL "
    "SELECT id, project_id, key_id, session_id, base_model, 'score', status, NULL FROM scores",
    "usage_source_versions": "SELECT id, project_id, base_model, size_bytes, created_at, CAST(NULL AS bigint) AS "
    "deleted_at FROM versions",
}


def upgrade() -> None:
    postgres = op.get_bind().dialect.name == "postgresql"
    _usage_facts(postgres)
    op.add_column(
        "operations", sa.Column("tokens", sa.BigInteger(), comment="Model-input tokens that it is billed for")
    )
    _tables()
    for name, query in VIEWS.items():
        op.execute(f"CREATE VIEW {name} AS {query}")
    op.execute("INSERT INTO ledger_inbox (project_id, source, meter) SELECT project_id, source, meter FROM usage_facts")
    if postgres:
        _postgres_triggers()
    else:
        _sqlite_triggers()


def _usage_facts(postgres: bool) -> None:
    """Add columns and the meter ``storage``. SQLite cannot change a CHECK: the table is made anew."""
    words = "meter IN ('prefill', 'cached_prefill', 'sample', 'train', 'storage')"
    if postgres:
        for column in _new_columns():
            op.add_column("usage_facts", column)
        for name, comment in (("source", "Operation or sample that consumed it"), ("quantity", "Units of the meter")):
            op.alter_column("usage_facts", name, comment=comment)
        op.drop_constraint("ck_usage_facts_meter", "usage_facts", type_="check")
        op.create_check_constraint("ck_usage_facts_meter", "usage_facts", words)
    else:
        op.drop_index("ix_usage_facts_at", "usage_facts")
        op.rename_table("usage_facts", "usage_facts_before")
        op.create_table(
            "usage_facts",
            sa.Column("source", sa.Text(), nullable=False),
            sa.Column("meter", sa.Text(), nullable=False),
            sa.Column("quantity", sa.BigInteger(), nullable=False),
            sa.Column("project_id", sa.Text(), nullable=False),
            sa.Column("key_id", sa.Text(), nullable=False),
            sa.Column("session_id", sa.Text()),
            sa.Column("version_id", sa.Text()),
            sa.Column("base_model", sa.Text(), nullable=False),
            sa.Column("at", sa.BigInteger(), nullable=False),
            *_new_columns(),
            sa.CheckConstraint(words, name="ck_usage_facts_meter"),
            sa.CheckConstraint("quantity > 0", name="ck_usage_facts_quantity"),
            sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_usage_facts_project_id"),
            sa.PrimaryKeyConstraint("source", "meter", name="pk_usage_facts"),
        )
        kept = "source, meter, quantity, project_id, key_id, session_id, version_id, base_model, at"
        op.execute(f"INSERT INTO usage_facts ({kept}) SELECT {kept} FROM usage_facts_before")
        op.drop_table("usage_facts_before")
        op.create_index("ix_usage_facts_at", "usage_facts", ["project_id", "at"])
    op.create_index(
        "ix_usage_facts_engine",
        "usage_facts",
        ["engine", "at"],
        sqlite_where=sa.text("engine IS NOT NULL"),
        postgresql_where=sa.text("engine IS NOT NULL"),
    )


def _new_columns() -> list[sa.Column[str]]:
    return [
        sa.Column("tag", sa.Text(), comment="The customer's own label"),
        sa.Column("engine", sa.Text(), comment="The engine that computed it"),
    ]


def _tables() -> None:
    op.create_table(
        "price_lists",
        sa.Column(
            "number", sa.Integer(), autoincrement=False, nullable=False, comment="1, 2, 3, ...: the highest one counts"
        ),
        sa.Column("digest", sa.Text(), nullable=False, comment="Lower-case hex sha256 of the text"),
        sa.Column("text", sa.Text(), nullable=False, comment="The list as TOML"),
        sa.Column("applied_at", sa.BigInteger(), nullable=False, comment="When"),
        sa.CheckConstraint("number >= 1", name="ck_price_lists_number"),
        sa.CheckConstraint("length(digest) = 64", name="ck_price_lists_digest"),
        sa.PrimaryKeyConstraint("number", name="pk_price_lists"),
    )
    op.create_table(
        "ledger_postings",
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False, comment="1, 2, 3, ... without gaps"),
        sa.Column("kind", sa.Text(), nullable=False, comment="Why it exists"),
        sa.Column("project_id", sa.Text(), nullable=False, comment="Whose account it moves"),
        sa.Column("source", sa.Text(), nullable=False, comment="Operation, sample or decision that it books"),
        sa.Column("meter", sa.Text(), nullable=False, comment="What was counted; of a decision its kind"),
        sa.Column("base_model", sa.Text(), comment="Decided the price"),
        sa.Column("key_id", sa.Text(), comment="The key that asked"),
        sa.Column("session_id", sa.Text(), comment="The session, if any"),
        sa.Column("version_id", sa.Text(), comment="The version that answered, if any"),
        sa.Column("tag", sa.Text(), comment="The customer's own label"),
        sa.Column("quantity", sa.BigInteger(), nullable=False, comment="Units counted; 0 of a decision"),
        sa.Column("rate", sa.BigInteger(), nullable=False, comment="Nano-USD per million units"),
        sa.Column("price_list", sa.Integer(), comment="The price list that the rate is from"),
        sa.Column(
            "amount", sa.BigInteger(), nullable=False, comment="Nano-USD that the project owes more; negative: less"
        ),
        sa.Column("reason", sa.Text(), comment="Of a decision: why"),
        sa.Column("at", sa.BigInteger(), nullable=False, comment="When it was consumed or decided"),
        sa.Column("posted_at", sa.BigInteger(), nullable=False, comment="When it was booked"),
        sa.Column("previous", sa.Text(), nullable=False, comment="Hash of the posting before it"),
        sa.Column(
            "hash", sa.Text(), nullable=False, comment="sha256 over this posting, its entries and the hash before it"
        ),
        sa.CheckConstraint("number >= 1", name="ck_ledger_postings_number"),
        sa.CheckConstraint("kind IN ('usage', 'credit', 'adjustment', 'refund')", name="ck_ledger_postings_kind"),
        sa.CheckConstraint("(kind = 'usage') = (reason IS NULL)", name="ck_ledger_postings_reason"),
        sa.CheckConstraint("quantity >= 0 AND rate >= 0", name="ck_ledger_postings_quantity"),
        sa.CheckConstraint("length(hash) = 64 AND length(previous) = 64", name="ck_ledger_postings_hash"),
        sa.PrimaryKeyConstraint("number", name="pk_ledger_postings"),
    )
    op.create_index("uq_ledger_postings_once", "ledger_postings", ["project_id", "source", "meter"], unique=True)
    op.create_index("ix_ledger_postings_project", "ledger_postings", ["project_id", "at"])
    op.create_index(
        "ix_ledger_postings_session",
        "ledger_postings",
        ["session_id"],
        sqlite_where=sa.text("session_id IS NOT NULL"),
        postgresql_where=sa.text("session_id IS NOT NULL"),
    )
    op.create_table(
        "ledger_entries",
        sa.Column("posting", sa.BigInteger(), nullable=False, comment="Whose half it is"),
        sa.Column("line", sa.Integer(), nullable=False, comment="1, 2, ... within the posting"),
        sa.Column(
            "account", sa.Text(), nullable=False, comment="project/ID, revenue/METER, credits, adjustments or refunds"
        ),
        sa.Column("amount", sa.BigInteger(), nullable=False, comment="Nano-USD; the entries of a posting add up to 0"),
        sa.CheckConstraint("line >= 1", name="ck_ledger_entries_line"),
        sa.ForeignKeyConstraint(["posting"], ["ledger_postings.number"], name="fk_ledger_entries_posting"),
        sa.PrimaryKeyConstraint("posting", "line", name="pk_ledger_entries"),
    )
    op.create_index("ix_ledger_entries_account", "ledger_entries", ["account"])
    op.create_table(
        "ledger_head",
        sa.Column("one", sa.Integer(), autoincrement=False, nullable=False, comment="1: there is one row"),
        sa.Column(
            "number", sa.BigInteger(), nullable=False, comment="Of the last posting: a lost end of the chain shows"
        ),
        sa.Column("hash", sa.Text(), nullable=False, comment="Of the last posting"),
        sa.CheckConstraint("one = 1", name="ck_ledger_head_one"),
        sa.PrimaryKeyConstraint("one", name="pk_ledger_head"),
    )
    op.create_table(
        "ledger_inbox",
        sa.Column("project_id", sa.Text(), nullable=False, comment="Of the usage fact"),
        sa.Column("source", sa.Text(), nullable=False, comment="Of the usage fact"),
        sa.Column("meter", sa.Text(), nullable=False, comment="Of the usage fact; a trigger adds every new fact"),
        sa.PrimaryKeyConstraint("project_id", "source", "meter", name="pk_ledger_inbox"),
    )
    op.create_table(
        "ledger_spend",
        sa.Column("scope", sa.Text(), nullable=False, comment="project, key or session"),
        sa.Column("scope_id", sa.Text(), nullable=False, comment="Its id"),
        sa.Column("month", sa.Text(), nullable=False, comment="Of the usage, UTC: 2026-01"),
        sa.Column(
            "nanos", sa.BigInteger(), nullable=False, comment="Sum of its usage postings: a projection, reconciled"
        ),
        sa.CheckConstraint("scope IN ('project', 'key', 'session')", name="ck_ledger_spend_scope"),
        sa.PrimaryKeyConstraint("scope", "scope_id", "month", name="pk_ledger_spend"),
    )
    op.create_table(
        "budgets",
        sa.Column("scope", sa.Text(), nullable=False, comment="project, key or session"),
        sa.Column("scope_id", sa.Text(), nullable=False, comment="Its id"),
        sa.Column("project_id", sa.Text(), nullable=False, comment="Whose budget it is"),
        sa.Column("period", sa.Text(), nullable=False, comment="total, or month: starts afresh with each month, UTC"),
        sa.Column("hard_nanos", sa.BigInteger(), comment="Nothing runs that could spend more; null: no end"),
        sa.Column("soft_nanos", sa.BigInteger(), comment="Answers warn from here on; null: no warning"),
        sa.Column("warned", sa.Text(), comment="The period in which the warning was raised last"),
        sa.CheckConstraint("scope IN ('project', 'key', 'session')", name="ck_budgets_scope"),
        sa.CheckConstraint("period IN ('total', 'month')", name="ck_budgets_period"),
        sa.CheckConstraint("hard_nanos IS NOT NULL OR soft_nanos IS NOT NULL", name="ck_budgets_limits"),
        sa.CheckConstraint("hard_nanos >= 0", name="ck_budgets_hard"),
        sa.CheckConstraint("soft_nanos >= 0", name="ck_budgets_soft"),
        sa.PrimaryKeyConstraint("scope", "scope_id", name="pk_budgets"),
    )
    op.create_index("ix_budgets_project", "budgets", ["project_id"])
    op.create_table(
        "hold_owners",
        sa.Column("owner", sa.Text(), nullable=False, comment="A gateway process"),
        sa.Column("expires_at", sa.BigInteger(), nullable=False, comment="Dead from then on: its holds are released"),
        sa.PrimaryKeyConstraint("owner", name="pk_hold_owners"),
    )
    op.create_table(
        "holds",
        sa.Column("source", sa.Text(), nullable=False, comment="Operation or sample that money is set aside for"),
        sa.Column("project_id", sa.Text(), nullable=False, comment="Who pays"),
        sa.Column("key_id", sa.Text(), nullable=False, comment="The key that asked"),
        sa.Column("session_id", sa.Text(), comment="The session, if any"),
        sa.Column("base_model", sa.Text(), nullable=False, comment="Decides the price"),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False, comment="The most an engine may count"),
        sa.Column("sample_tokens", sa.BigInteger(), nullable=False, comment="The most an engine may count"),
        sa.Column(
            "amount",
            sa.BigInteger(),
            nullable=False,
            comment="The most it can cost; what it did cost once that is known",
        ),
        sa.Column(
            "owner", sa.Text(), comment="The process that works on it; null: an operation, or done and not yet posted"
        ),
        sa.Column("at", sa.BigInteger(), nullable=False, comment="When"),
        sa.CheckConstraint("amount >= 0 AND prompt_tokens >= 0 AND sample_tokens >= 0", name="ck_holds_amount"),
        sa.PrimaryKeyConstraint("source", name="pk_holds"),
    )
    op.create_index("ix_holds_project", "holds", ["project_id"])
    op.create_index("ix_holds_owner", "holds", ["owner"])
    op.create_table(
        "lost_calls",
        sa.Column("source", sa.Text(), nullable=False, comment="The call that a gateway died in"),
        sa.Column("base_model", sa.Text(), nullable=False, comment="Whose engine worked on it"),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False, comment="The most its engine may have counted"),
        sa.Column("sample_tokens", sa.BigInteger(), nullable=False, comment="The most its engine may have counted"),
        sa.Column("at", sa.BigInteger(), nullable=False, comment="When the call began"),
        sa.PrimaryKeyConstraint("source", name="pk_lost_calls"),
    )
    op.create_table(
        "engine_readings",
        sa.Column("engine", sa.Text(), nullable=False, comment="Address of the engine"),
        sa.Column(
            "started_at", sa.BigInteger(), nullable=False, comment="When its process started: counters began at 0"
        ),
        sa.Column("base_model", sa.Text(), nullable=False, comment="What it serves"),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False, comment="Its counter at the last quiet reading"),
        sa.Column(
            "generation_tokens", sa.BigInteger(), nullable=False, comment="Its counter at the last quiet reading"
        ),
        sa.Column(
            "read_at",
            sa.BigInteger(),
            nullable=False,
            comment="When nothing was running, and all usage was recorded",
        ),
        sa.PrimaryKeyConstraint("engine", "started_at", name="pk_engine_readings"),
    )


def _sqlite_triggers() -> None:
    for table in APPEND_ONLY:
        for verb in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER {table}_refuses_{verb.lower()} BEFORE {verb} ON {table} "
                f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
            )
    op.execute(
        "CREATE TRIGGER usage_facts_to_inbox AFTER INSERT ON usage_facts BEGIN "
        "INSERT INTO ledger_inbox (project_id, source, meter) VALUES (NEW.project_id, NEW.source, NEW.meter); END"
    )


def _postgres_triggers() -> None:
    op.execute(
        "CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION '% is append-only', TG_TABLE_NAME; END $$"
    )
    op.execute(
        "CREATE FUNCTION put_into_inbox() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "INSERT INTO ledger_inbox (project_id, source, meter) VALUES (NEW.project_id, NEW.source, NEW.meter); "
        "RETURN NULL; END $$"
    )
    for table in APPEND_ONLY:
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
        )
        op.execute(f"REVOKE UPDATE, DELETE, TRUNCATE ON {table} FROM PUBLIC")
    op.execute(
        "CREATE TRIGGER usage_facts_to_inbox AFTER INSERT ON usage_facts FOR EACH ROW EXECUTE FUNCTION put_into_inbox()"
    )
