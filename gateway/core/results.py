"""The closed union of outcomes, one per payload, plus Failure."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.core.errors import Kind
from gateway.core.ids import VersionId
from gateway.core.tensors import TensorData


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardResult:
    """Of forward and forward_backward.

    ``outputs`` has one mapping per datum in request order, ``logprobs`` float32 in the shape of its target tokens.
    Metric names are ``name:reduction`` (sum, mean, min, max), so that clients can merge chunks.
    """

    outputs: tuple[Mapping[str, TensorData], ...]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStepResult:
    """``optimizer_step`` counts the session's steps, this one included."""

    optimizer_step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """Of save_weights and save_state: the version that now exists, and the last seq and step that it contains."""

    version_id: VersionId
    group: str
    number: int
    seq: int
    optimizer_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadStateResult:
    """``discarded_gradient`` says that an accumulated gradient was thrown away by the load."""

    version_id: VersionId
    optimizer_step: int
    discarded_gradient: bool


Result = ForwardResult | OptimStepResult | SaveResult | LoadStateResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an operation did not happen. Weights, moments and accumulated gradient are as before it."""

    kind: Kind
    code: str
    message: str
    field: str | None = None
    details: Mapping[str, str | int | float] = dataclasses.field(default_factory=dict[str, str | int | float])


Outcome = Result | Failure
