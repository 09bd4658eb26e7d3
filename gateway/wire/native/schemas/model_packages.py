"""Model package groups and their versions."""

from datetime import datetime
from typing import Literal

from gateway.wire.native.schemas.base import Create, PageQuery, Read
from gateway.wire.native.schemas.labels import Metadata
from gateway.wire.native.schemas.sessions import LoraRead


class GroupRead(Read):
    """A model package group; ``latest`` maps a version kind to its highest number, ``aliases`` an alias to its number.

    ``versions`` counts all that there ever were, ``size_bytes`` the files that are still stored.
    """

    name: str
    versions: int
    size_bytes: int
    created_at: datetime
    latest: dict[str, int]
    aliases: dict[str, int]


class GroupList(Read):
    data: list[GroupRead]


class CanaryRead(Read):
    """What the publish gate measured, in nats per token."""

    mean_difference: float
    max_difference: float
    tolerance: float
    mean_tolerance: float
    control_mean_difference: float
    base_mean_difference: float
    effect_ratio: float
    inconclusive: bool
    engine: str
    seconds: float


class CheckRead(Read):
    """The gate's last verdict on one engine: ``report``, or why the version failed."""

    engine: str
    occasion: str
    at: datetime
    passed: bool
    report: CanaryRead | None
    failure: str | None


class VersionRead(Read):
    """A version of a model package. ``address``, ``arn``, ``tinker_path`` and any alias name the same row."""

    id: str
    address: str
    group: str
    number: int
    kind: str
    state: str
    session_id: str
    operation_id: str
    parent_id: str | None
    base_model: str
    lora: LoraRead
    seq: int
    optimizer_step: int
    manifest_sha256: str
    fingerprint: str
    size_bytes: int
    arn: str
    tinker_path: str | None
    aliases: list[str]
    name: str | None
    description: str
    user_metadata: dict[str, str]
    tags: list[str]
    ttl_seconds: int | None
    base_sha256: str | None
    code_version: str | None
    created_at: datetime
    published_at: datetime | None
    expires_at: datetime | None
    deleted_at: datetime | None
    purged_at: datetime | None
    canary: CanaryRead | None
    checks: list[CheckRead]


class VersionPage(Read):
    """Newest first; ``next`` is the ``after`` of the next page."""

    data: list[VersionRead]
    next: str | None


class VersionsQuery(PageQuery):
    """``kind``, ``state``, ``session_id`` and ``tag`` restrict; ``deleted`` shows deleted and expired ones as well."""

    kind: Literal["adapter", "merged", "state"] | None = None
    state: Literal["staged", "published", "rejected"] | None = None
    session_id: str | None = None
    tag: str | None = None
    deleted: bool = False


class VersionEdit(Create):
    """What is left out stays as it is; ``ttl_seconds`` null: it never expires, else it counts from now."""

    description: str | None = None
    user_metadata: Metadata | None = None
    tags: list[str] | None = None
    ttl_seconds: int | None = None


class AliasSet(Create):
    """``version`` is a number of the group, or any other spelling of one of its versions."""

    version: int | str


class EventRead(Read):
    """``previous`` is the number that an alias named before; without ``key_id`` the gateway acted by itself."""

    id: str
    version: str
    version_id: str
    event: str
    alias: str | None
    previous: int | None
    key_id: str | None
    at: datetime


class EventList(Read):
    """Newest first; ``next`` is the ``after`` of the following page, null on the last."""

    data: list[EventRead]
    next: str | None


class VerificationRead(Read):
    """``passed`` when every engine that could be asked computed what the trainer computed."""

    version: str
    passed: bool
    checks: list[CheckRead]
