"""Model package groups and their versions."""

from datetime import datetime

from gateway.wire.native.schemas.base import Read
from gateway.wire.native.schemas.sessions import LoraRead


class GroupRead(Read):
    """A model package group; ``latest`` maps a version kind to its highest number."""

    name: str
    versions: int
    created_at: datetime
    latest: dict[str, int]


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


class VersionRead(Read):
    """A version of a model package."""

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
    description: str
    created_at: datetime
    published_at: datetime | None
    canary: CanaryRead | None


class VersionPage(Read):
    """Newest first; ``next`` is the ``after`` of the next page."""

    data: list[VersionRead]
    next: str | None
