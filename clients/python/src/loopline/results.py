"""What comes out. ``usage`` counts tokens per meter and ``cost_nanos`` is their price in nano-USD, as billed."""

from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from loopline.types import TensorData


class _Read(BaseModel):
    """An answer: fields this version does not know are dropped, so that an older client reads a newer gateway."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Billed(_Read):
    """What every billed call's answer tells."""

    usage: dict[str, int] = Field(default_factory=dict[str, int])
    cost_nanos: int = 0


class ForwardBackwardOutput(Billed):
    """Of ``forward``, ``forward_backward`` and ``forward_backward_custom``.

    ``loss_fn_outputs`` has one mapping per datum in request order; ``logprobs`` is float32 ``[N]``. Metric names end in
    their reduction (``loss:sum``, ``kl:mean``); chunks of a large batch are merged by it.
    """

    loss_fn_outputs: list[dict[str, TensorData]]
    metrics: dict[str, float]


class OptimStepResponse(Billed):
    """``optimizer_step`` counts the session's steps, this one included."""

    optimizer_step: int
    metrics: dict[str, float]


class _Saved(Billed):
    version: str
    version_id: str
    group: str
    number: int

    @property
    def model_package_arn(self) -> str:
        """The version's address, under the name that loops written for SageMaker read."""
        return self.version


class SaveWeightsResponse(_Saved):
    """The adapter (or merged model) that now exists, addressed as ``group@number`` by ``version``."""


class SaveStateResponse(_Saved):
    """The resumable state that now exists, addressed as ``group@number`` by ``version``."""


class LoadStateResponse(Billed):
    """``discarded_gradient`` says that an accumulated gradient was thrown away by the load."""

    version_id: str
    optimizer_step: int
    discarded_gradient: bool


class StopReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"


class SampledSequence(_Read):
    """``logprobs[i]`` is log p of ``tokens[i]`` under the distribution it was drawn from."""

    tokens: list[int]
    logprobs: list[float]
    stop_reason: StopReason


class TokenLogprob(_Read):
    """One alternative at a prompt position; travels as the pair ``[token_id, logprob]``."""

    token_id: int
    logprob: float

    @model_validator(mode="before")
    @classmethod
    def _of_pair(cls, value: Any) -> Any:
        match value:
            case [token_id, logprob]:
                return {"token_id": token_id, "logprob": logprob}
            case _:
                return value


class _Answered(Billed):
    id: str
    base_model: str
    version: str | None = None
    version_id: str | None = None
    fingerprint: str


class SampleResponse(_Answered):
    """Samples, and the exact weights that drew them.

    ``version`` is ``group@number``, None for the base model; ``fingerprint`` names the weights. Prompt lists have the
    prompt's length, None at position 0; they are None when not asked for.
    """

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[TokenLogprob] | None] | None = None


class Session(_Read):
    """A training session as the gateway describes it."""

    id: str
    name: str | None = None
    base_model: str
    lora: dict[str, Any]
    model_package_group: str
    status: str
    activity: str
    created_at: datetime
    last_used_at: datetime
    expires_at: datetime | None = None
    user_metadata: dict[str, str] = Field(default_factory=dict[str, str])
    applied_seq: int
    optimizer_step: int
    latest_version: str | None = None
    failure: str | None = None
    recovered_seq: int | None = None
    replay_note: str | None = None
    cost_nanos: int = 0


class ModelPackage(_Read):
    """One version of a model package group. ``kind`` is ``adapter``, ``merged`` or ``state``."""

    id: str
    address: str
    group: str
    number: int
    kind: str
    state: str
    session_id: str | None = None
    base_model: str
    lora: dict[str, Any]
    optimizer_step: int
    fingerprint: str | None = None
    size_bytes: int | None = None
    name: str | None = None
    description: str | None = None
    aliases: list[str] = Field(default_factory=list[str])
    tags: list[str] = Field(default_factory=list[str])
    user_metadata: dict[str, str] = Field(default_factory=dict[str, str])
    tinker_path: str | None = None
    arn: str | None = None
    created_at: datetime
    published_at: datetime | None = None
    expires_at: datetime | None = None
    deleted_at: datetime | None = None
    canary: dict[str, Any] | None = None
    checks: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])

    @property
    def model_package_arn(self) -> str:
        """The version's address, under the name that loops written for SageMaker read."""
        return self.address


class Verification(_Read):
    """The gate's verdicts, one per engine; ``passed`` when every engine computed what the trainer computed."""

    version: str
    passed: bool
    checks: list[dict[str, Any]]


class UsageLine(_Read):
    """A sum and its price in nano-USD. What was not grouped by is None.

    Quantities are tokens of one ``meter`` (``prefill``, ``cached_prefill``, ``sample``, ``train``), or of ``storage``
    kilobytes for a month.
    """

    start: datetime | None = None
    project_id: str | None = None
    key_id: str | None = None
    session_id: str | None = None
    base_model: str | None = None
    meter: str | None = None
    tag: str | None = None
    quantity: int
    cost_nanos: int


class Usage(_Read):
    """The token bill."""

    total_cost_nanos: int
    data: list[UsageLine]


class EstimateLine(_Read):
    """One meter of a planned loop: tokens, price in nano-USD per million, cost in nano-USD."""

    meter: str
    quantity: int
    rate_nanos: int
    cost_nanos: int


class Estimate(_Read):
    """What a loop costs if every sample is as long as allowed and nothing is found in a cache."""

    base_model: str
    lines: list[EstimateLine]
    step_cost_nanos: int
    cost_nanos: int
