"""Requests and responses of sampling, as the ``tinker`` SDK spells them."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from gateway.wire.tinker.schemas import Asked, Number, Told


class CreateSamplerAsked(Asked):
    """A handle on weights that answer."""

    session_id: str
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class SamplerTold(Told):
    """What the handle is called."""

    sampling_session_id: str
    type: Literal["create_sampling_session"] = "create_sampling_session"


class JoinSamplerAsked(Asked):
    """One more process uses a handle."""

    sampling_session_id: str
    type: Literal["join_sampling_session"] = "join_sampling_session"


class JoinSamplerTold(Told):
    """That process's number."""

    client_counter: int
    type: Literal["join_sampling_session"] = "join_sampling_session"


class SamplerRead(Told):
    """What a handle stands for."""

    sampler_id: str
    base_model: str
    model_path: str | None


class Chunk(Asked):
    """A piece of a prompt; only text is read, the others are refused by name."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    type: Literal["encoded_text", "image", "image_asset_pointer", "dmel"] = "encoded_text"
    tokens: list[int] | None = None


class PromptAsked(Asked):
    """A prompt."""

    chunks: list[Chunk]


class SamplingParamsAsked(Asked):
    """How to sample."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class TensorAsked(Asked):
    """An array as JSON: dense, or CSR where the row offsets are given."""

    data: list[int]
    dtype: Literal["int64"]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class SampleAsked(Asked):
    """Draw samples."""

    num_samples: int = 1
    prompt: PromptAsked
    sampling_params: SamplingParamsAsked
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: Annotated[int, Field(ge=0, lt=2**62)] | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorAsked | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None
    type: Literal["sample"] = "sample"
