"""Model-package versions: what a save creates. Immutable, numbered per group, addressed as ``group@n``.

Life: ``staged`` (artefact complete and checksummed) -> ``published`` (the gate saw the engine compute what the
trainer computed) or ``rejected``. Only published adapters answer requests.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from gateway.core.errors import Invalid
from gateway.core.ids import OperationId, ProjectId, SessionId, VersionId
from gateway.core.sessions import LoraConfig

GROUP_NAME = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?")
GROUP_NAME_RULE = "1 to 63 of a-z, A-Z, 0-9 and '-', neither first nor last a '-'"


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

    ``control_mean_difference`` is their mean difference without the adapter, on the same tokens;
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
class NewVersion:
    """What the trainer hands over with a save. ``location`` is a store-made directory name, never a user's text."""

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
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A version as recorded. ``seq`` and ``optimizer_step`` are the last ones its weights contain."""

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
    description: str
    created_at: datetime
    published_at: datetime | None
    canary: CanaryReport | None

    @property
    def address(self) -> str:
        return f"{self.group}@{self.number}"

    @property
    def fingerprint(self) -> str:
        """The short hash that every answer of this version carries."""
        return f"lp-{self.manifest_sha256[:16]}"


def check_group_name(name: str, *, field: str = "model_package_group") -> str:
    if GROUP_NAME.fullmatch(name) is None:
        raise Invalid(f"model package group {name[:80]!r} must be {GROUP_NAME_RULE}", field=field)
    return name


def parse_address(text: str) -> tuple[str, int] | None:
    """Split ``group@n``; return None when ``text`` is not of that form."""
    group, at, number = text.rpartition("@")
    if not at or GROUP_NAME.fullmatch(group) is None or re.fullmatch(r"[1-9][0-9]{0,8}", number, re.ASCII) is None:
        return None
    return group, int(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A model package group and how many versions it has."""

    name: str
    versions: int
    created_at: datetime
    latest: Mapping[VersionKind, int]
