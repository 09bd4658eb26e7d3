"""Requests and responses as this dialect spells them.

Requests (``*Create``) refuse unknown fields and convert nothing: a number in quotes is not a number. Responses
(``*Read``) have no defaults: every field is always there.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from gateway.core.payloads import Publish
from gateway.core.sessions import MAX_TTL_S

MIN_TTL_S = 60
MAX_METADATA = 64
_NAME = r"^[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?$"

SessionName = Annotated[str, StringConstraints(pattern=_NAME)]
MetadataKey = Annotated[str, StringConstraints(min_length=1, max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]


class Create(BaseModel):
    """Base of every request body."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Read(BaseModel):
    """Base of every response body."""

    model_config = ConfigDict(frozen=True)


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
    user_metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_METADATA)] = {}


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
    """A session. ``expires_at`` moves on with every use."""

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
    order: str


class SessionPage(Read):
    """Newest first; ``next`` is the ``after`` of the next page."""

    data: list[SessionRead]
    next: str | None


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


class SaveWeightsCreate(Create):
    """Save sampler weights, or with ``merge_weights`` a full model."""

    seq: int | None = None
    merge_weights: bool = False
    publish: Literal["eager", "lazy"] = Publish.EAGER.value
    model_package_group: str | None = None
    description: str = ""


class SaveStateCreate(Create):
    """Save a resumable state."""

    seq: int | None = None
    model_package_group: str | None = None
    description: str = ""


class LoadStateCreate(Create):
    """Load ``version`` (``group@n`` or a version id); without ``optimizer`` its weights alone."""

    seq: int | None = None
    version: str
    optimizer: bool = True


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
    """Of save_weights and save_state: the version that now exists."""

    type: Literal["save"]
    version: str
    version_id: str
    group: str
    number: int


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


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class SampleCreate(Create):
    """Draw continuations of a prompt of token ids. Defaults sample from the model's own distribution."""

    prompt: list[int]
    num_samples: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop: Annotated[list[str], BeforeValidator(_one_or_many, json_schema_input_type=str | list[str])] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    version: str | None = None


class FreeSampleCreate(SampleCreate):
    """As SampleCreate without a session: exactly one of ``version`` and ``base_model``."""

    base_model: str | None = None


class LogprobsCreate(Create):
    """Score a prompt of token ids."""

    prompt: list[int]
    version: str | None = None


class FreeLogprobsCreate(LogprobsCreate):
    """As LogprobsCreate without a session: exactly one of ``version`` and ``base_model``."""

    base_model: str | None = None


class SequenceRead(Read):
    """One sampled sequence; ``logprobs[i]`` is of ``tokens[i]``, in nats."""

    tokens: list[int]
    logprobs: list[float]
    stop_reason: str


class SampleUsageRead(Read):
    """Tokens by meter."""

    prefill: int
    cached_prefill: int
    sample: int


class AnswerRead(Read):
    """What every answer says: which exact version gave it, and what it cost."""

    id: str
    base_model: str
    version: str | None
    version_id: str | None
    fingerprint: str
    usage: SampleUsageRead
    cost_nanos: int


class SampleRead(AnswerRead):
    """Prompt lists have the prompt's length and null at position 0."""

    sequences: list[SequenceRead]
    prompt_logprobs: list[float | None] | None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None


class LogprobsRead(AnswerRead):
    """``logprobs`` has the prompt's length and null at position 0."""

    logprobs: list[float | None]


class BaseModelRead(Read):
    """A base model and its limits."""

    name: str
    context_length: int
    vocab_size: int
    max_lora_rank: int
    dtype: str
    tokenizer_files: list[str]


class BaseModelList(Read):
    data: list[BaseModelRead]


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
    base_mean_difference: float
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


class UsageRow(Read):
    """A sum over one key, session, base model and meter."""

    key_id: str
    session_id: str | None
    base_model: str
    meter: str
    quantity: int
    cost_nanos: int


class UsageRead(Read):
    total_cost_nanos: int
    data: list[UsageRow]


class PageQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    limit: Annotated[int, Field(ge=1, le=200)] = 50
    after: str | None = None


class OperationsQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    limit: Annotated[int, Field(ge=1, le=200)] = 50
    after_seq: Annotated[int, Field(ge=0, lt=2**31)] = 0


class WaitQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    wait: Annotated[float, Field(ge=0, le=60, allow_inf_nan=False)] = 0.0


class UsageQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    session_id: str | None = None
    since: AwareDatetime | None = None
    until: AwareDatetime | None = None
