"""The tables of billing. What must never happen is forbidden here or by a trigger; ``migrations/`` makes both.

Ids of projects, keys, sessions and versions are kept by value: the books stay readable when their owners are gone.
Moments are whole microseconds since 1970 in UTC, money whole nano-USD.
"""

from sqlalchemy import BigInteger, CheckConstraint, Column, ForeignKey, Index, Integer, MetaData, Table, Text, text

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

price_lists = Table(
    "price_lists",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=False, comment="1, 2, 3, ...: the highest one counts"),
    Column("digest", Text, nullable=False, comment="Lower-case hex sha256 of the text"),
    Column("text", Text, nullable=False, comment="The list as TOML"),
    Column("applied_at", BigInteger, nullable=False, comment="When"),
    CheckConstraint("number >= 1", name="number"),
    CheckConstraint("length(digest) = 64", name="digest"),
)

postings = Table(
    "ledger_postings",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False, comment="1, 2, 3, ... without gaps"),
    Column("kind", Text, nullable=False, comment="Why it exists"),
    Column("project_id", Text, nullable=False, comment="Whose account it moves"),
    Column("source", Text, nullable=False, comment="Operation, sample or decision that it books"),
    Column("meter", Text, nullable=False, comment="What was counted; of a decision its kind"),
    Column("base_model", Text, comment="Decided the price"),
    Column("key_id", Text, comment="The key that asked"),
    Column("session_id", Text, comment="The session, if any"),
    Column("version_id", Text, comment="The version that answered, if any"),
    Column("tag", Text, comment="The customer's own label"),
    Column("quantity", BigInteger, nullable=False, comment="Units counted; 0 of a decision"),
    Column("rate", BigInteger, nullable=False, comment="Nano-USD per million units"),
    Column("price_list", Integer, comment="The price list that the rate is from"),
    Column("amount", BigInteger, nullable=False, comment="Nano-USD that the project owes more; negative: less"),
    Column("reason", Text, comment="Of a decision: why"),
    Column("at", BigInteger, nullable=False, comment="When it was consumed or decided"),
    Column("posted_at", BigInteger, nullable=False, comment="When it was booked"),
    Column("previous", Text, nullable=False, comment="Hash of the posting before it"),
    Column("hash", Text, nullable=False, comment="sha256 over this posting, its entries and the hash before it"),
    CheckConstraint("number >= 1", name="number"),
    CheckConstraint("kind IN ('usage', 'credit', 'adjustment', 'refund')", name="kind"),
    CheckConstraint("(kind = 'usage') = (reason IS NULL)", name="reason"),
    CheckConstraint("quantity >= 0 AND rate >= 0", name="quantity"),
    CheckConstraint("length(hash) = 64 AND length(previous) = 64", name="hash"),
    Index("uq_ledger_postings_once", "project_id", "source", "meter", unique=True),
    Index("ix_ledger_postings_project", "project_id", "at"),
    Index(
        "ix_ledger_postings_session",
        "session_id",
        sqlite_where=text("session_id IS NOT NULL"),
        postgresql_where=text("session_id IS NOT NULL"),
    ),
)

entries = Table(
    "ledger_entries",
    metadata,
    Column("posting", BigInteger, ForeignKey(postings.c.number), primary_key=True, comment="Whose half it is"),
    Column("line", Integer, primary_key=True, comment="1, 2, ... within the posting"),
    Column("account", Text, nullable=False, comment="project/ID, revenue/METER, credits, adjustments or refunds"),
    Column("amount", BigInteger, nullable=False, comment="Nano-USD; the entries of a posting add up to 0"),
    CheckConstraint("line >= 1", name="line"),
    Index("ix_ledger_entries_account", "account"),
)

ledger_head = Table(
    "ledger_head",
    metadata,
    Column("one", Integer, primary_key=True, autoincrement=False, comment="1: there is one row"),
    Column("number", BigInteger, nullable=False, comment="Of the last posting: a lost end of the chain shows"),
    Column("hash", Text, nullable=False, comment="Of the last posting"),
    CheckConstraint("one = 1", name="one"),
)

inbox = Table(
    "ledger_inbox",
    metadata,
    Column("project_id", Text, primary_key=True, comment="Of the usage fact"),
    Column("source", Text, primary_key=True, comment="Of the usage fact"),
    Column("meter", Text, primary_key=True, comment="Of the usage fact; a trigger adds every new fact"),
)

spend = Table(
    "ledger_spend",
    metadata,
    Column("scope", Text, primary_key=True, comment="project, key or session"),
    Column("scope_id", Text, primary_key=True, comment="Its id"),
    Column("month", Text, primary_key=True, comment="Of the usage, UTC: 2026-01"),
    Column("nanos", BigInteger, nullable=False, comment="Sum of its usage postings: a projection, reconciled"),
    CheckConstraint("scope IN ('project', 'key', 'session')", name="scope"),
)

budgets = Table(
    "budgets",
    metadata,
    Column("scope", Text, primary_key=True, comment="project, key or session"),
    Column("scope_id", Text, primary_key=True, comment="Its id"),
    Column("project_id", Text, nullable=False, comment="Whose budget it is"),
    Column("period", Text, nullable=False, comment="total, or month: starts afresh with each month, UTC"),
    Column("hard_nanos", BigInteger, comment="Nothing runs that could spend more; null: no end"),
    Column("soft_nanos", BigInteger, comment="Answers warn from here on; null: no warning"),
    Column("warned", Text, comment="The period in which the warning was raised last"),
    CheckConstraint("scope IN ('project', 'key', 'session')", name="scope"),
    CheckConstraint("period IN ('total', 'month')", name="period"),
    CheckConstraint("hard_nanos IS NOT NULL OR soft_nanos IS NOT NULL", name="limits"),
    CheckConstraint("hard_nanos >= 0", name="hard"),
    CheckConstraint("soft_nanos >= 0", name="soft"),
    Index("ix_budgets_project", "project_id"),
)

holders = Table(
    "hold_owners",
    metadata,
    Column("owner", Text, primary_key=True, comment="A gateway process"),
    Column("expires_at", BigInteger, nullable=False, comment="Dead from then on: its holds are released"),
)

holds = Table(
    "holds",
    metadata,
    Column("source", Text, primary_key=True, comment="Operation or sample that money is set aside for"),
    Column("project_id", Text, nullable=False, comment="Who pays"),
    Column("key_id", Text, nullable=False, comment="The key that asked"),
    Column("session_id", Text, comment="The session, if any"),
    Column("base_model", Text, nullable=False, comment="Decides the price"),
    Column("prompt_tokens", BigInteger, nullable=False, comment="The most an engine may count"),
    Column("sample_tokens", BigInteger, nullable=False, comment="The most an engine may count"),
    Column("amount", BigInteger, nullable=False, comment="The most it can cost; what it did cost once that is known"),
    Column("owner", Text, comment="The process that works on it; null: an operation, or done and not yet posted"),
    Column("at", BigInteger, nullable=False, comment="When"),
    CheckConstraint("amount >= 0 AND prompt_tokens >= 0 AND sample_tokens >= 0", name="amount"),
    Index("ix_holds_project", "project_id"),
    Index("ix_holds_owner", "owner"),
)

lost_calls = Table(
    "lost_calls",
    metadata,
    Column("source", Text, primary_key=True, comment="The call that a gateway died in"),
    Column("base_model", Text, nullable=False, comment="Whose engine worked on it"),
    Column("prompt_tokens", BigInteger, nullable=False, comment="The most its engine may have counted"),
    Column("sample_tokens", BigInteger, nullable=False, comment="The most its engine may have counted"),
    Column("at", BigInteger, nullable=False, comment="When the call began"),
)

engine_readings = Table(
    "engine_readings",
    metadata,
    Column("engine", Text, primary_key=True, comment="Address of the engine"),
    Column("started_at", BigInteger, primary_key=True, comment="When its process started: counters began at 0"),
    Column("base_model", Text, nullable=False, comment="What it serves"),
    Column("prompt_tokens", BigInteger, nullable=False, comment="Its counter at the last quiet reading"),
    Column("generation_tokens", BigInteger, nullable=False, comment="Its counter at the last quiet reading"),
    Column("read_at", BigInteger, nullable=False, comment="When nothing was running, and all usage was recorded"),
)
