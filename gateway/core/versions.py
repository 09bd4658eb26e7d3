"""Model-package versions: what a save creates. Immutable, numbered per group, addressed as ``group@n``.

Life: ``staged`` (artefact complete and checksummed) -> ``published`` (the gate saw the engine compute what the
trainer computed) or ``rejected``. Only published adapters answer requests. A version that is deleted or expired answers
nothing from then on; it can be brought back until its files are removed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from gateway.core.errors import Conflict, Invalid, NotFound
from gateway.core.ids import KeyId, OperationId, ProjectId, SessionId, VersionId
from gateway.core.sessions import LoraConfig

GROUP_NAME = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?")
GROUP_NAME_RULE = "1 to 63 of a-z, A-Z, 0-9 and '-', neither first nor last a '-'"
TAG = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.:-]{0,62}")
TAG_RULE = "1 to 63 of a-z, A-Z, 0-9, '_', '.', ':' and '-', a letter or digit first"
MAX_TAGS = 32
MAX_VERSION_TTL_S = 10 * 365 * 24 * 3600


class VersionKind(StrEnum):
    """What the artefact holds."""

    ADAPTER = "adapter"  # sampler weights
    MERGED = "merged"  # a full deployable model
    STATE = "state"  # weights + optimizer + counters, resumable


class VersionState(StrEnum):
    """How far a version is trusted."""

    STAGED = "staged"
    PUBLISHED = "published"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryReport:
    """What the gate measured: absolute log-probability differences (nats) between trainer and engine.

    ``tolerance`` bounds the largest one, ``mean_tolerance`` the mean. ``control_mean_difference`` is the mean without
    the adapter, on the same tokens;
    ``base_mean_difference`` is the mean absolute difference between the adapter's and the base model's own scores;
    ``effect_ratio`` is how much of that the engine shows (1 where both agree);
    ``inconclusive`` says that it was within tolerance, so the engine could not be shown to apply the adapter.
    """

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """What a version's owner says of it. ``name`` is unique among a session's versions of one kind and never changes;
    with ``ttl_s`` the version expires that many seconds after it was saved."""

    name: str | None = None
    description: str = ""
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    tags: tuple[str, ...] = ()
    ttl_s: int | None = None

    def __post_init__(self) -> None:
        if len(set(self.tags)) != len(self.tags) or len(self.tags) > MAX_TAGS:
            raise Invalid(f"tags must be at most {MAX_TAGS}, each once", field="tags", details={"limit": MAX_TAGS})
        for index, tag in enumerate(self.tags):
            if TAG.fullmatch(tag) is None:
                raise Invalid(f"tags[{index}] must be {TAG_RULE}", field=f"tags[{index}]")
        if self.ttl_s is not None and not 1 <= self.ttl_s <= MAX_VERSION_TTL_S:
            raise Invalid(
                f"ttl_seconds must be 1 to {MAX_VERSION_TTL_S}, got {self.ttl_s}",
                field="ttl_seconds",
                details={"limit": MAX_VERSION_TTL_S, "got": self.ttl_s},
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class NewVersion:
    """What the trainer hands over with a save. ``location`` is a store-made directory name, never a user's text.

    ``base_sha256`` is the hash of the base model's files, ``code_version`` the release of Loopline that trained.
    """

    id: VersionId
    kind: VersionKind
    group: str
    base_model: str
    lora: LoraConfig
    seq: int
    optimizer_step: int
    location: str
    manifest_sha256: str
    size_bytes: int
    labels: Labels
    base_sha256: str
    code_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A version as recorded. ``seq`` and ``optimizer_step`` are the last ones its weights contain.

    ``base_sha256`` and ``code_version`` are None in versions saved before they were recorded; ``purged_at`` says that
    its files are gone.
    """

    id: VersionId
    project_id: ProjectId
    group: str
    number: int
    kind: VersionKind
    state: VersionState
    session_id: SessionId
    operation_id: OperationId
    parent_id: VersionId | None
    base_model: str
    lora: LoraConfig
    seq: int
    optimizer_step: int
    location: str
    manifest_sha256: str
    size_bytes: int
    labels: Labels
    base_sha256: str | None
    code_version: str | None
    created_at: datetime
    published_at: datetime | None
    expires_at: datetime | None
    deleted_at: datetime | None
    purged_at: datetime | None
    canary: CanaryReport | None

    @property
    def address(self) -> str:
        return f"{self.group}@{self.number}"

    @property
    def fingerprint(self) -> str:
        """The short hash that every answer of this version carries."""
        return f"lp-{self.manifest_sha256[:16]}"

    def require_present(self, at: datetime | None = None, *, field: str = "version") -> None:
        """Raise unless it may still be used at ``at``; without a moment only a deletion on record counts.

        Raises:
            NotFound: permanent, ``version_deleted`` or ``version_expired``.
        """
        ended = self.deleted_at or at
        if self.expires_at is not None and ended is not None and self.expires_at <= ended:
            raise NotFound(f"{self.address} has expired", code="version_expired", field=field)
        if self.deleted_at is not None:
            raise NotFound(f"{self.address} was deleted", code="version_deleted", field=field)


def check_group_name(name: str, *, field: str = "model_package_group") -> str:
    if GROUP_NAME.fullmatch(name) is None:
        raise Invalid(f"model package group {name[:80]!r} must be {GROUP_NAME_RULE}", field=field)
    return name


def name_taken(name: str, kind: VersionKind) -> Conflict:
    """Return the refusal of a save under a name that its session has used."""
    return Conflict(
        f"this session already saved a version of kind {kind} named {name!r}; names are never reused",
        code="version_name_taken",
        field="name",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A model package group: how many versions it ever had, and how many bytes those take that are still stored.

    ``latest`` is the highest number of each kind that was neither rejected nor deleted.
    """

    name: str
    versions: int
    size_bytes: int
    created_at: datetime
    latest: Mapping[VersionKind, int]
    aliases: Mapping[str, int]
    description: str = ""
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFilter:
    """Which versions a list shows; None does not restrict. Deleted ones are shown only when asked for.

    ``named`` leaves out those that were saved without a name.
    """

    group: str | None = None
    kind: VersionKind | None = None
    state: VersionState | None = None
    session_id: SessionId | None = None
    tag: str | None = None
    deleted: bool = False
    named: bool = False


class Event(StrEnum):
    """What happened to a version after it was saved."""

    ALIASED = "aliased"
    UNALIASED = "unaliased"
    EDITED = "edited"
    DELETED = "deleted"
    EXPIRED = "expired"
    UNDELETED = "undeleted"
    PURGED = "purged"  # its files were removed


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionEvent:
    """One line of a group's history. ``previous`` is the version that an alias moved from; without ``key_id`` the
    gateway did it by itself."""

    id: str
    version_id: VersionId
    number: int
    event: Event
    alias: str | None
    previous: int | None
    key_id: KeyId | None
    at: datetime


class Occasion(StrEnum):
    """Why a version went through the gate."""

    PUBLISH = "publish"
    LOAD = "load"  # at use, after it had been pushed out or the engine was restarted
    VERIFY = "verify"  # somebody asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The last verdict of the gate about a version on one engine: a report, or why it failed."""

    version_id: VersionId
    engine: str
    occasion: Occasion
    at: datetime
    report: CanaryReport | None
    failure: str | None
