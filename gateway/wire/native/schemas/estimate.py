"""A planned training loop, and what it will cost."""

from typing import Annotated

from pydantic import Field

from gateway.wire.native.schemas.base import Create, Read

Count = Annotated[int, Field(ge=0, le=10**9)]


class EstimateCreate(Create):
    """A loop of ``steps`` equal steps. Every length is in tokens.

    Each step trains ``batch_size`` datums of ``datum_tokens`` model-input tokens ``passes`` times (forward and
    forward_backward both count), and samples ``samples`` continuations of up to ``sample_tokens`` tokens for each of
    ``prompts`` prompts of ``prompt_tokens`` tokens.
    """

    base_model: str
    steps: Annotated[int, Field(ge=1, le=10**7)] = 1
    batch_size: Count = 0
    datum_tokens: Count = 0
    passes: Annotated[int, Field(ge=1, le=1000)] = 1
    prompts: Count = 0
    prompt_tokens: Count = 0
    samples: Count = 1
    sample_tokens: Count = 0


class EstimateLine(Read):
    """One meter: how much, at which price (nano-USD per million), for how much."""

    meter: str
    quantity: int
    rate_nanos: int
    cost_nanos: int


class EstimateRead(Read):
    """At today's prices. ``cost_nanos`` is what the loop costs if every sample is as long as allowed and no prompt is
    found in a cache: an upper bound, up to a rounding of 1 nano-USD per call."""

    base_model: str
    lines: list[EstimateLine]
    step_cost_nanos: int
    cost_nanos: int
