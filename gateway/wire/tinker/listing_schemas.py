"""Requests and responses of listings and upkeep, as the ``tinker`` SDK spells them."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from gateway.wire.tinker.schemas import Asked, Optimizer, Told


class Cursor(Told):
    """Where a page starts, and how many there are in all."""

    offset: int
    limit: int
    total_count: int


class CheckpointRead(Told):
    """A save."""

    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler", "external"]
    time: datetime
    tinker_path: str
    size_bytes: int
    public: bool
    user_metadata: dict[str, str]
    expires_at: datetime | None


class TrainingRunRead(Told):
    """A session."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool = True
    corrupted: bool
    lora_rank: int
    last_request_time: datetime
    last_checkpoint: CheckpointRead | None
    last_sampler_checkpoint: CheckpointRead | None
    user_metadata: dict[str, str]


class PageQuery(BaseModel):
    """Which part of a list. The other parameters that the SDK sends say nothing here: a key sees its project."""

    model_config = ConfigDict(frozen=True)

    limit: Annotated[int, Field(ge=1, le=1000)] = 100
    offset: Annotated[int, Field(ge=0, lt=2**31)] = 0


class UsageQuery(BaseModel):
    """Which hours."""

    model_config = ConfigDict(frozen=True)

    starting_on: AwareDatetime
    ending_before: AwareDatetime


class CheckpointPage(Told):
    """Checkpoints, newest first."""

    checkpoints: list[CheckpointRead]
    cursor: Cursor


class TrainingRunPage(Told):
    """Training runs, newest first."""

    training_runs: list[TrainingRunRead]
    cursor: Cursor


class TtlAsked(Asked):
    """How long a checkpoint lives; null: for ever."""

    ttl_seconds: Annotated[int, Field(ge=3600, le=315_360_000)] | None


class CopyAsked(Asked):
    """Copy a checkpoint."""

    source_path: str
    destination_project_id: str
    ttl_seconds: int | None = None
    weights_access_token: str | None = None


class CopyTold(Told):
    """Where a copy is."""

    tinker_path: str


class WeightsInfoAsked(Asked):
    """Describe a checkpoint."""

    tinker_path: str


class WeightsInfoTold(Told):
    """What a checkpoint was trained on."""

    base_model: str
    optimizer_config: Optimizer = Optimizer()
    is_lora: bool = True
    lora_rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool


class ExternalUrls(Told):
    """Where an adapter's files can be fetched, and until when."""

    urls: dict[str, str]
    expires: datetime


class SessionList(Told):
    """Programs, newest first."""

    sessions: list[str]


class SessionRead(Told):
    """What a program opened."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str]
    display_name: str | None


class ProjectAsked(Asked):
    """Move a program to a project."""

    project_id: str
