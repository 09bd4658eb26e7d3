"""Training sessions: base model + LoRA config + optimizer state, one owner.

Invariants: ``applied_seq`` only grows; a session's operations run in one order, chosen by its opener; a session
that is not running accepts no operation.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from gateway.core.clients import Seat
from gateway.core.errors import Conflict, Invalid
from gateway.core.ids import KeyId, ProjectId, SessionId, VersionId

MAX_RANK = 256
MAX_TTL_S = 30 * 24 * 3600


class SessionStatus(StrEnum):
    """Where a session stands in its life."""

    CREATING = "creating"
    RUNNING = "running"
    STOPPING = "stopping"  # the running operation finishes, later ones are skipped
    STOPPED = "stopped"
    FAILED = "failed"
    EXPIRED = "expired"


class Activity(StrEnum):
    """What a running session is doing."""

    ACTIVE = "active"  # work is queued or running
    IDLE = "idle"
    RECOVERING = "recovering"  # a trainer rebuilds its state by replay


class OrderRule(StrEnum):
    """How sequence numbers are read."""

    STRICT = "strict"  # 1, 2, 3, ...: a later seq waits for a missing one
    ASCENDING = "ascending"  # the next higher number seen: a hole blocks nobody


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Which layers train, and how. ``seed`` fixes the initial A matrices.

    The adapter's product B A is scaled by alpha / rank, with ``use_rslora`` by alpha / sqrt(rank).
    """

    rank: int
    alpha: float
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    seed: int
    use_rslora: bool = False

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= MAX_RANK:
            raise Invalid(f"rank must be 1 to {MAX_RANK}, got {self.rank}", field="lora.rank")
        if not 0 < self.alpha <= 65536:
            raise Invalid(f"alpha must be above 0 and at most 65536, got {self.alpha}", field="lora.alpha")
        if not 0 <= self.seed < 2**63:
            raise Invalid(f"seed must be 0 to 2^63 - 1, got {self.seed}", field="lora.seed")
        if not (self.train_attn or self.train_mlp or self.train_unembed):
            raise Invalid("at least one of train_attn, train_mlp, train_unembed must be true", field="lora")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeRules:
    """What a session's bits depend on beside its operations and the code. Frozen when a trainer first runs it.

    ``threads`` are those of a CPU kernel; ``micro_batch_tokens`` bounds the padded tokens computed at once.
    """

    threads: int
    micro_batch_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """A rebuild under way: it has come to ``seq``. ``losses`` counts the trainers in a row that were lost over it."""

    seq: int
    losses: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Where a session's state was last written, and the seq it contains. ``location`` is a store-made name."""

    seq: int
    location: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A session as recorded.

    ``applied_seq`` is the highest seq the trainer has dealt with (completed, failed or staged); 0 before the first.
    ``window_broken_by`` is the seq of a failed forward_backward since the last optim_step: the window is incomplete.
    ``rules`` are None before a trainer first ran it. ``made_with`` names what computed since the last snapshot
    (device, versions of libraries); ``replay_note`` says how the last replay differed from that, None when it did not.
    ``seat`` is its opener's own number for it, where the opener is a client. ``removed_at``: no list shows it since.
    """

    id: SessionId
    project_id: ProjectId
    key_id: KeyId
    name: str | None
    base_model: str
    lora: LoraConfig
    group: str
    order: OrderRule
    status: SessionStatus
    activity: Activity
    created_at: datetime
    last_used_at: datetime
    ttl_s: int | None
    expires_at: datetime | None
    user_metadata: Mapping[str, str]
    applied_seq: int
    optimizer_step: int
    window_broken_by: int | None
    snapshot: Snapshot | None
    latest_version_id: VersionId | None
    failure: str | None
    recovery: Recovery | None = None
    rules: ComputeRules | None = None
    made_with: Mapping[str, str] | None = None
    replay_note: str | None = None
    seat: Seat | None = None
    removed_at: datetime | None = None

    @property
    def address(self) -> str:
        """What clients call it: ``client-...:train:n``, or its id where no client opened it."""
        return self.id if self.seat is None else self.seat.session_address

    def require_running(self) -> None:
        """Raise unless the session accepts work.

        Raises:
            Conflict: ``session_not_running``, permanent.
        """
        if self.status not in (SessionStatus.CREATING, SessionStatus.RUNNING):
            raise Conflict(f"session {self.id} is {self.status}; it accepts no more work", code="session_not_running")
