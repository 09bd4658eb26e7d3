"""Sessions and their LoRA configuration."""

from datetime import datetime
from typing import Annotated

from pydantic import Field

from gateway.core.sessions import MAX_TTL_S
from gateway.wire.native.schemas.base import Create, Read
from gateway.wire.native.schemas.labels import Metadata
from gateway.wire.texts import matching

MIN_TTL_S = 60

SessionName = Annotated[
    str,
    *matching(
        r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?",
        "1 to 63 of a-z, A-Z, 0-9, '_', '.' and '-', neither first nor last a mark",
    ),
]


class LoraCreate(Create):
    """Which layers train, and how. ``seed`` is drawn when it is left out.

    The scale is alpha / rank, with ``use_rslora`` alpha / sqrt(rank).
    """

    rank: int = 32
    alpha: float = 64.0
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = False
    seed: int | None = None
    use_rslora: bool = False


class SessionCreate(Create):
    """``model_package_group`` defaults to the session's id; without ``ttl_seconds`` the session never expires."""

    base_model: str
    name: SessionName | None = None
    lora: LoraCreate = LoraCreate()
    model_package_group: str | None = None
    ttl_seconds: Annotated[int, Field(ge=MIN_TTL_S, le=MAX_TTL_S)] | None = None
    user_metadata: Metadata = Field(default={})


class LoraRead(Read):
    """A session's or version's LoRA configuration."""

    rank: int
    alpha: float
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    seed: int
    use_rslora: bool


class SessionRead(Read):
    """A session. ``expires_at`` moves on with every use; ``tokens`` and ``cost_nanos`` are what it consumed.

    While ``activity`` is ``recovering``, ``recovered_seq`` says how far its state has been rebuilt. ``replay_note``
    says that a rebuild ran with other versions of libraries than the first run, and with which.
    """

    id: str
    name: str | None
    base_model: str
    lora: LoraRead
    model_package_group: str
    status: str
    activity: str
    created_at: datetime
    last_used_at: datetime
    expires_at: datetime | None
    ttl_seconds: int | None
    user_metadata: dict[str, str]
    applied_seq: int
    optimizer_step: int
    latest_version: str | None
    latest_version_id: str | None
    failure: str | None
    recovered_seq: int | None
    replay_note: str | None
    order: str
    tokens: int
    cost_nanos: int


class SessionPage(Read):
    """Newest first; ``next`` is the ``after`` of the next page."""

    data: list[SessionRead]
    next: str | None
