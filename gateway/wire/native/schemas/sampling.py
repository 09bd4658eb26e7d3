"""Sampling and scoring of token ids."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from gateway.wire.native.schemas.base import Create, Read


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


OneOrMany = Annotated[list[str], BeforeValidator(_one_or_many, json_schema_input_type=str | list[str])]


class SampleCreate(Create):
    """Draw continuations of a prompt of token ids. Defaults sample from the model's own distribution."""

    prompt: list[int]
    num_samples: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop: OneOrMany = Field(default=[])
    stop_token_ids: list[int] = Field(default=[])
    ignore_eos: bool = False
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    version: str | None = None


class FreeSampleCreate(SampleCreate):
    """As SampleCreate without a session: exactly one of ``version`` and ``base_model``."""

    base_model: str | None = None


class LogprobsCreate(Create):
    """Score a prompt of token ids, or other ids in its place.

    ``targets[t]``, or every id of row ``alternatives[t]``, is scored as the token after ``prompt[: t + 1]``; all rows
    are equally long. ``temperature`` divides the logits.
    """

    prompt: list[int]
    targets: list[int] | None = None
    alternatives: list[list[int]] | None = None
    temperature: float = 1.0
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
    """``logprobs`` has the prompt's length: null at position 0 of a scored prompt, never null of targets.

    Of alternatives it is null, and ``alternative_logprobs`` has their shape.
    """

    logprobs: list[float | None] | None
    alternative_logprobs: list[list[float]] | None
