"""Operations: what a session is asked to do, and what came of it. Batches are read by ``native.payloads``."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.core.payloads import Publish
from gateway.wire.native.schemas.base import Create, Read
from gateway.wire.native.schemas.labels import LabelsCreate


class AdamCreate(Create):
    """Hyper-parameters of one step. ``grad_clip_norm`` 0 does not clip; LoRA+ multiplies the rate of B matrices."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    lora_plus_lr_ratio: float = 1.0


class OptimStepCreate(Create):
    """One AdamW step on the accumulated gradient."""

    seq: int | None = None
    adam_params: AdamCreate = AdamCreate()


class SaveWeightsCreate(LabelsCreate):
    """Save sampler weights, or with ``merge_weights`` a full model."""

    seq: int | None = None
    merge_weights: bool = False
    publish: Literal["eager", "lazy"] = Publish.EAGER.value
    model_package_group: str | None = None


class SaveStateCreate(LabelsCreate):
    """Save a resumable state."""

    seq: int | None = None
    model_package_group: str | None = None


class LoadStateCreate(Create):
    """Load ``version`` (in any of its spellings); without ``optimizer`` its weights alone."""

    seq: int | None = None
    version: str
    optimizer: bool = True


class OperationsQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    limit: Annotated[int, Field(ge=1, le=200)] = 50
    after_seq: Annotated[int, Field(ge=0, lt=2**31)] = 0


class WaitQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    wait: Annotated[float, Field(ge=0, le=60, allow_inf_nan=False)] = 0.0


class TensorRead(Read):
    """A dense array, flattened row by row."""

    dtype: str
    shape: list[int]
    data: list[float] | list[int]


class ForwardRead(Read):
    """Of forward and forward_backward: one mapping per datum, in request order."""

    type: Literal["forward"]
    loss_fn_outputs: list[dict[str, TensorRead]]
    metrics: dict[str, float]


class OptimStepRead(Read):
    """Of optim_step: how many steps the session has taken, this one included."""

    type: Literal["optim_step"]
    optimizer_step: int
    metrics: dict[str, float]


class SaveRead(Read):
    """Of save_weights and save_state: the version that now exists, and the last seq and step that it contains."""

    type: Literal["save"]
    version: str
    version_id: str
    group: str
    number: int
    seq: int
    optimizer_step: int


class LoadStateRead(Read):
    """Of load_state; ``discarded_gradient`` says that an accumulated gradient was thrown away."""

    type: Literal["load_state"]
    version_id: str
    optimizer_step: int
    discarded_gradient: bool


ResultRead = Annotated[ForwardRead | OptimStepRead | SaveRead | LoadStateRead, Field(discriminator="type")]


class FailureRead(Read):
    """Why an operation did not happen."""

    code: str
    kind: str
    message: str
    field: str | None
    details: dict[str, Any]


class ProgressRead(Read):
    """Datums computed, and datums to compute."""

    done: int
    total: int


class OperationRead(Read):
    """An operation. ``result`` or ``error`` is there once the status is final, ``progress`` while it computes."""

    id: str
    session_id: str
    seq: int
    kind: str
    status: str
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    queue_position: int | None
    waits_for_seq: int | None
    progress: ProgressRead | None
    result: ResultRead | None
    error: FailureRead | None
    usage: dict[str, int]
    cost_nanos: int


class OperationPage(Read):
    """By seq, without results; ``next`` is the ``after_seq`` of the next page."""

    data: list[OperationRead]
    next: int | None
