"""Sampling and scoring: tokens in, tokens and per-token log-probabilities out, by one exact version."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from gateway.core.catalog import BaseModel
from gateway.core.errors import GatewayError, Invalid, Kind
from gateway.core.ids import ProjectId
from gateway.core.validation import check_tokens
from gateway.core.versions import Version

MAX_SAMPLES = 256
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_TOPK_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What answers: a version of an adapter on a base model, or (``version`` None) the base model itself.

    ``asker`` is whose turn at the engine a call to the base model takes; a version's is its owner's.
    """

    base: BaseModel
    version: Version | None
    asker: ProjectId | None = field(default=None, compare=False)

    @property
    def project_id(self) -> ProjectId | None:
        """Whose turn at the engine a call takes."""
        return self.asker if self.version is None else self.version.project_id

    @property
    def fingerprint(self) -> str:
        """Names the exact weights: the version's short manifest hash, or the base model."""
        return self.version.fingerprint if self.version is not None else f"base-{self.base.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample.

    ``max_tokens`` None means what is left of the context. ``top_k`` -1 keeps all tokens. ``temperature`` 0 is greedy.
    Stop strings and stop ids end a sequence and are part of its tokens; so does the model's own end-of-sequence
    token unless ``ignore_eos``. Sample i of a seeded request is drawn with ``seed + i``.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """Draw ``num_samples`` continuations of ``prompt`` (token ids, at least one).

    ``prompt_logprobs`` asks for the log-probability of each prompt token at temperature 1 (position 0 has none),
    ``topk_prompt_logprobs`` for that many most likely alternatives at each position, ``topk_logprobs`` for that many
    of the distribution that each token was drawn from.
    """

    prompt: tuple[int, ...]
    num_samples: int = 1
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_logprobs: int = 0


class StopReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """``logprobs[i]`` is log p of ``tokens[i]`` under the distribution it was drawn from (nats); ``topk[i]`` are its
    most likely tokens, the likeliest first, where they were asked for."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: StopReason
    topk: tuple[Mapping[int, float], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """The engine's own counts of one call. ``cached`` prompt tokens are part of ``prompt``.

    ``extra_prompt`` and ``extra_sampled`` tokens were computed beside and are nobody's bill: an engine counts a prompt
    again for each of its samples, and generates a token to score a prompt. ``engine`` is its address.
    """

    engine: str
    prompt: int
    cached: int
    sampled: int
    extra_prompt: int = 0
    extra_sampled: int = 0

    def without_sampled(self) -> "TokenCounts":
        """Return the counts of a call that scores its prompt: the token generated for it is nobody's bill."""
        return replace(self, sampled=0, extra_sampled=self.sampled + self.extra_sampled)

    def unbilled(self) -> "TokenCounts":
        """Return the counts of a call that nobody pays for."""
        return TokenCounts(
            engine=self.engine,
            prompt=0,
            cached=0,
            sampled=0,
            extra_prompt=self.prompt + self.extra_prompt,
            extra_sampled=self.sampled + self.extra_sampled,
        )


class Stopped(GatewayError):
    """The caller had an engine stop. ``counts`` is what it had done by then, None when that is nothing."""

    kind = Kind.CONFLICT
    default_code = "sample_cancelled"

    def __init__(self, counts: TokenCounts | None) -> None:
        super().__init__("this sample was cancelled")
        self.counts = counts

    def __reduce__(self) -> tuple[object, ...]:
        return (Stopped, (self.counts,))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAnswer:
    """A JSON answer, or one chunk of a streamed one, and the address of the engine that gave it."""

    engine: str
    document: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The answer to a SampleRequest. Prompt lists have the prompt's length and None at position 0."""

    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: tuple[float | None, ...] | None
    topk_prompt_logprobs: tuple[Mapping[int, float] | None, ...] | None
    counts: TokenCounts


def check_sample_request(request: SampleRequest, model: BaseModel) -> None:
    """Check a request against the model's vocabulary and context and the gateway's limits.

    Raises:
        Invalid: names field, position and limit; ``context_length_exceeded`` carries both numbers.
    """
    params = request.params
    if not request.prompt:
        raise Invalid("prompt must hold at least one token", field="prompt")
    check_tokens(request.prompt, model, field="prompt")
    check_tokens(params.stop_token_ids, model, field="stop_token_ids")
    _between("num_samples", request.num_samples, 1, MAX_SAMPLES)
    _between("topk_prompt_logprobs", request.topk_prompt_logprobs, 0, MAX_TOPK_LOGPROBS)
    _between("topk_logprobs", request.topk_logprobs, 0, MAX_TOPK_LOGPROBS)
    wanted = 1 if params.max_tokens is None else params.max_tokens
    if wanted < 1:
        raise Invalid(f"max_tokens must be at least 1, got {wanted}", field="max_tokens")
    if len(request.prompt) + wanted > model.context_length:
        raise Invalid(
            f"prompt of {len(request.prompt)} tokens plus max_tokens {wanted} exceeds the context of "
            f"{model.context_length} tokens",
            code="context_length_exceeded",
            field="max_tokens" if len(request.prompt) < model.context_length else "prompt",
            details={"limit": model.context_length, "got": len(request.prompt) + wanted},
        )
    if not (math.isfinite(params.temperature) and 0 <= params.temperature <= 2):
        raise Invalid(f"temperature must be 0 to 2, got {params.temperature}", field="temperature")
    if not (math.isfinite(params.top_p) and 0 < params.top_p <= 1):
        raise Invalid(f"top_p must be above 0 and at most 1, got {params.top_p}", field="top_p")
    if params.top_k != -1 and not 1 <= params.top_k <= model.vocab_size:
        raise Invalid(f"top_k must be -1 or 1 to {model.vocab_size}, got {params.top_k}", field="top_k")
    if params.seed is not None:
        _between("seed", params.seed, 0, 2**63 - 1 - MAX_SAMPLES)
    if params.temperature == 0 and request.num_samples > 1:
        raise Invalid("num_samples must be 1 at temperature 0: all samples would be equal", field="num_samples")
    if len(params.stop) + len(params.stop_token_ids) > MAX_STOPS:
        raise Invalid(f"at most {MAX_STOPS} stop strings and ids together", field="stop", details={"limit": MAX_STOPS})
    for index, text in enumerate(params.stop):
        if not 1 <= len(text) <= MAX_STOP_LENGTH:
            raise Invalid(f"stop[{index}] must have 1 to {MAX_STOP_LENGTH} characters", field=f"stop[{index}]")


def _between(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise Invalid(f"{name} must be {low} to {high}, got {value}", field=name, details={"limit": high, "got": value})
