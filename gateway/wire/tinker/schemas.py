"""Requests and responses as the ``tinker`` SDK spells them. Requests refuse unknown fields and convert nothing."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

MAX_METADATA = 64
_MAX_INT = 2**31 - 1

MetadataKey = Annotated[str, StringConstraints(min_length=1, max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=4096)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_METADATA)]
Number = Annotated[int, Field(ge=0, le=999_999_999)]
"""A client's own number for one of its sessions or samplers."""
SeqId = Annotated[int, Field(ge=1, lt=_MAX_INT)]
Text = Annotated[str, StringConstraints(max_length=1024)]


class Asked(BaseModel):
    """Base of every request body."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())


class Told(BaseModel):
    """Base of every response body."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())


# Clients


class ClientConfigAsked(Asked):
    """Which SDK asks for its configuration."""

    sdk_version: str


class ClientConfig(Told):
    """What the SDK may rely on here."""

    parallel_fwdbwd_chunks: bool = True
    proto_compress_fwdbwd: bool = True
    fwdbwd_max_chunk_len: int
    sample_max_concurrent_requests: int = 2000
    sample_join_sampling_session: bool = True
    billing_exception_max_pause_duration_sec: int = 0  # out of budget: asked once more after 5 s, then told
    custom_loss_server_side: bool = True
    pjwt_auth_enabled: bool = False


class DynamicConfig(Told):
    """What the SDK asks for again now and then."""

    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = True
    sample_cancel_max_batch_size: int = 64


class SessionAsked(Asked):
    """A program introduces itself."""

    tags: Annotated[list[Text], Field(max_length=MAX_METADATA)]
    user_metadata: Metadata | None = None
    sdk_version: str
    project_id: str | None = None
    display_name: Text | None = None
    type: Literal["create_session"] = "create_session"


class SessionTold(Told):
    """What the program is called from now on."""

    session_id: str
    type: Literal["create_session"] = "create_session"


class HeartbeatAsked(Asked):
    """A program says that it lives."""

    session_id: str
    type: Literal["session_heartbeat"] = "session_heartbeat"


class HeartbeatTold(Told):
    """Heard."""

    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishReason(Asked):
    """How a program ended."""

    type: Literal["success", "errored", "interrupted"]


class FinishAsked(Asked):
    """A program says that it ended."""

    reason: FinishReason
    detail: Annotated[str, StringConstraints(max_length=65536)] | None = None


class SupportedModel(Told):
    """A base model of the catalogue."""

    model_name: str
    max_context_length: int
    trainable: bool
    sampleable: bool


class Capabilities(Told):
    """The base models there are."""

    supported_models: list[SupportedModel]


# Training


class Future(Told):
    """Where a result will be."""

    request_id: str
    model_id: str | None = None


class SampleFuture(Told):
    """Where a sample will be, and what its sequences are called."""

    request_id: str
    sample_sequence_ids: list[str]


class LoraAsked(Asked):
    """Which layers train."""

    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerAsked(Asked):
    """The optimizer's family; there is one."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    type: str


class CreateModelAsked(Asked):
    """Open a session."""

    session_id: str
    model_seq_id: Number
    base_model: str
    user_metadata: Metadata | None = None
    lora_config: LoraAsked = LoraAsked()
    optimizer_config: OptimizerAsked | None = None
    type: Literal["create_model"] = "create_model"


class GetInfoAsked(Asked):
    """Describe a session."""

    model_id: str
    type: Literal["get_info"] = "get_info"


class ModelData(Told):
    """A base model, and where its tokenizer is."""

    arch: str | None
    model_name: str
    tokenizer_id: str


class Optimizer(Told):
    """The optimizer's family."""

    type: Literal["adamw"] = "adamw"


class InfoTold(Told):
    """A session."""

    model_data: ModelData
    model_id: str
    optimizer_config: Optimizer = Optimizer()
    is_lora: bool = True
    lora_rank: int
    model_name: str
    type: Literal["get_info"] = "get_info"


class AdamAsked(Asked):
    """Hyper-parameters of one step."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStepAsked(Asked):
    """One optimizer step. ``optimizer_params`` is how other optimizers' steps are spelled."""

    model_id: str
    seq_id: SeqId
    adam_params: AdamAsked | None = None
    optimizer_params: OptimizerAsked | None = None
    type: Literal["optim_step"] = "optim_step"


# Saving and loading


class LoadWeightsAsked(Asked):
    """Load a state into a session, or open one with it."""

    model_id: str | None = None
    seq_id: SeqId | None = None
    session_id: str | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    user_metadata: Metadata | None = None
    path: str
    optimizer: bool
    optimizer_config: OptimizerAsked | None = None
    weights_access_token: str | None = None
    type: Literal["load_weights"] = "load_weights"


class SaveWeightsAsked(Asked):
    """Save a state."""

    model_id: str
    path: str | None = None
    seq_id: SeqId
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveSamplerAsked(Asked):
    """Save weights to sample from, under a name or as a sampler."""

    model_id: str
    path: str | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    seq_id: SeqId
    ttl_seconds: int | None = None
    user_metadata: Metadata | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveExternalAsked(Asked):
    """Save weights to take away."""

    model_id: str
    path: str
    seq_id: SeqId
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


# Futures


class RetrieveAsked(Asked):
    """Ask for a result."""

    request_id: str
    allow_metadata_only: bool = False


class CancelAsked(Asked):
    """Give a sample up."""

    request_id: str


class TryAgain(Told):
    """Not yet."""

    request_id: str
    queue_state: Literal["active", "paused_capacity", "paused_rate_limit"]
    queue_state_reason: str | None
    type: Literal["try_again"] = "try_again"


Document = dict[str, Any]
