"""The tables of model packages: groups, versions, and what is known of each version."""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    Table,
    Text,
    UniqueConstraint,
)

from gateway.core.versions import Event, Occasion, VersionKind, VersionState
from gateway.store.columns import UtcMicros, lora_columns, one_of, partial_index
from gateway.store.tables import metadata, operations, projects, sessions

groups = Table(
    "model_package_groups",
    metadata,
    Column("project_id", Text, ForeignKey(projects.c.id), primary_key=True, comment="Owner"),
    Column("name", Text, primary_key=True, comment="1 to 63 characters of a-z, A-Z, 0-9, '-'"),
    Column("versions", Integer, nullable=False, comment="How many there are: the highest number"),
    Column("created_at", UtcMicros, nullable=False, comment="When"),
    Column("description", Text, comment="Its owner's words; null: none"),
    Column("user_metadata", JSON(none_as_null=True), comment="Its owner's labels; null: none"),
    CheckConstraint("versions >= 0", name="versions"),
)

versions = Table(
    "versions",
    metadata,
    Column("id", Text, primary_key=True, comment="ver-..."),
    Column("project_id", Text, ForeignKey(projects.c.id), nullable=False, comment="Owner"),
    Column("group_name", Text, nullable=False, comment="Model package group"),
    Column("number", Integer, nullable=False, comment="1, 2, 3, ... within the group, without gaps"),
    Column("kind", Text, nullable=False, comment="What the artefact holds"),
    Column("state", Text, nullable=False, comment="How far it is trusted"),
    Column("session_id", Text, ForeignKey(sessions.c.id), nullable=False, comment="Where it was trained"),
    Column("operation_id", Text, ForeignKey(operations.c.id), nullable=False, comment="The save that made it"),
    Column("parent_id", Text, ForeignKey("versions.id"), comment="The session's version before it"),
    Column("base_model", Text, nullable=False, comment="Name in the catalogue"),
    *lora_columns(),
    Column("seq", Integer, nullable=False, comment="Last operation that its weights contain"),
    Column("optimizer_step", Integer, nullable=False, comment="Optimizer steps that its weights contain"),
    Column("location", Text, nullable=False, comment="Directory of the artefact store"),
    Column("manifest_sha256", Text, nullable=False, comment="Hash of the manifest, which hashes every file"),
    Column("size_bytes", BigInteger, nullable=False, comment="Size of its files together"),
    Column("description", Text, nullable=False, comment="The user's words"),
    Column("created_at", UtcMicros, nullable=False, comment="When staged"),
    Column("published_at", UtcMicros, comment="When the gate let it through"),
    Column("canary", JSON(none_as_null=True), comment="What the gate measured"),
    Column("lora_use_rslora", Boolean, comment="The scale is alpha / sqrt(rank); null: alpha / rank"),
    Column("name", Text, comment="What its session calls it; null: nothing"),
    Column("user_metadata", JSON(none_as_null=True), comment="The owner's own labels; null: none"),
    Column("tags", Text, comment="Words between spaces, sorted, a space at both ends; null: none"),
    Column("ttl_s", Integer, comment="Seconds after which it expires; null: never"),
    Column("expires_at", UtcMicros, comment="Answers nothing from then on; null: never"),
    Column("deleted_at", UtcMicros, comment="When it was deleted, or its expiry was noticed"),
    Column("purged_at", UtcMicros, comment="When its files were removed"),
    Column("base_sha256", Text, comment="Hash of the base model's files; null: not recorded"),
    Column("code_version", Text, comment="Release that trained it; null: not recorded"),
    Column("used_until", UtcMicros, comment="Deleted, yet a gateway works with it: its files stay until then"),
    one_of("kind", VersionKind),
    one_of("state", VersionState),
    CheckConstraint("number >= 1", name="number"),
    CheckConstraint("length(manifest_sha256) = 64", name="manifest"),
    CheckConstraint("(state = 'published') = (published_at IS NOT NULL)", name="published"),
    UniqueConstraint("project_id", "group_name", "number"),
    UniqueConstraint("operation_id"),
    UniqueConstraint("location"),
    Index("ix_versions_page", "project_id", "created_at", "id"),
    Index("ix_versions_session", "session_id", "seq"),
    partial_index("uq_versions_name", "session_id", "kind", "name", where="name IS NOT NULL", unique=True),
    partial_index("ix_versions_expiry", "expires_at", where="deleted_at IS NULL AND expires_at IS NOT NULL"),
    partial_index("ix_versions_deleted", "deleted_at", where="deleted_at IS NOT NULL AND purged_at IS NULL"),
    partial_index("ix_versions_staged", "created_at", where="state = 'staged'"),
)

aliases = Table(
    "version_aliases",
    metadata,
    Column("project_id", Text, ForeignKey(projects.c.id), primary_key=True, comment="Owner"),
    Column("group_name", Text, primary_key=True, comment="Model package group"),
    Column("alias", Text, primary_key=True, comment="Never 'latest', which moves by itself"),
    Column("version_id", Text, ForeignKey(versions.c.id), nullable=False, comment="What it names now"),
    Index("ix_version_aliases_version", "version_id"),
)

version_events = Table(
    "version_events",
    metadata,
    Column("id", Text, primary_key=True, comment="evt-..., in order of time"),
    Column("version_id", Text, ForeignKey(versions.c.id), nullable=False, comment="To what it happened"),
    Column("event", Text, nullable=False, comment="What happened"),
    Column("alias", Text, comment="The alias that was set or taken away"),
    Column("previous", Integer, comment="Number that the alias named before; null: none"),
    Column("key_id", Text, comment="The key that asked for it; null: the gateway did it by itself"),
    Column("at", UtcMicros, nullable=False, comment="When"),
    one_of("event", Event),
    Index("ix_version_events_version", "version_id", "id"),
)

version_checks = Table(
    "version_checks",
    metadata,
    Column("version_id", Text, ForeignKey(versions.c.id), primary_key=True, comment="What was judged"),
    Column("engine", Text, primary_key=True, comment="Where"),
    Column("occasion", Text, nullable=False, comment="Why"),
    Column("at", UtcMicros, nullable=False, comment="When, the last time"),
    Column("report", JSON(none_as_null=True), comment="What was measured; null: it failed"),
    Column("failure", Text, comment="Why it failed; null: it passed"),
    one_of("occasion", Occasion),
    CheckConstraint("(report IS NULL) = (failure IS NOT NULL)", name="verdict"),
)
