"""The canary: proof that an engine computes with a version what the trainer computed.

The trainer writes token sequences and its own log-probabilities for them, with the adapter and without, into the
version's manifest. The gate scores the same tokens through the engine, with the adapter and without, and compares, in
nats per token. Scores without the adapter are the control: how far rounding alone takes this engine from the trainer,
on these tokens and this hardware.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul

from gateway.core.errors import GatewayError, Kind
from gateway.core.versions import CanaryReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """Parallel tuples, one entry per sequence. Log-probabilities start at position 1: token 0 has none."""

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    base_logprobs: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Differences that count as agreement, in nats: a mean that always does, and the largest of one token.

    With the adapter the mean may also be twice the control's, which may itself be at most four times ``mean``.
    """

    mean: float
    maximum: float

    @property
    def control_mean(self) -> float:
        return 4 * self.mean


# Measured between a torch trainer and vLLM on one machine: float32 3e-5 at most; bfloat16 mean 0.02 to 0.07 and at most
# 0.4 on chat text, more where tokens are less likely. bfloat16 keeps 8 bits, float16 11.
TOLERANCES: Mapping[str, Tolerance] = {
    "float32": Tolerance(mean=2e-4, maximum=1e-3),
    "bfloat16": Tolerance(mean=0.05, maximum=1.0),
    "float16": Tolerance(mean=0.02, maximum=0.5),
}


class CanaryMismatch(GatewayError):
    """The engine does not compute what the trainer computed; the version must not be served."""

    kind = Kind.INTERNAL
    default_code = "canary_mismatch"


def judge(
    canary: Canary,
    scores: Sequence[Sequence[float]],
    base_scores: Sequence[Sequence[float]],
    *,
    dtype: str,
    engine: str,
    seconds: float,
) -> CanaryReport:
    """Compare the engine's scores of the canary (same shape as ``canary.logprobs``) with the trainer's.

    When adapter and base differ by more than the tolerance in the trainer, they must differ alike in the engine: the
    least-squares ratio of the engine's differences to the trainer's, token by token, is 1 where both agree, 0 for an
    adapter that bound to nothing, and 2 for a doubled scale; rounding averages out. When they do not differ, the report
    is ``inconclusive``.

    Raises:
        CanaryMismatch: carries the measured numbers.
    """
    tolerance = TOLERANCES[dtype]
    control, _ = _differences(canary.base_logprobs, base_scores)
    if not control <= tolerance.control_mean:
        raise CanaryMismatch(
            f"engine and trainer disagree on the base model itself: mean {control:.3g} nats "
            f"(allowed {tolerance.control_mean:.3g} for {dtype})",
            code="base_mismatch",
            details={"mean": control, "allowed_mean": tolerance.control_mean},
        )
    allowed_mean = max(tolerance.mean, 2 * control)
    mean, maximum = _differences(canary.logprobs, scores)
    effect, _ = _differences(canary.logprobs, canary.base_logprobs)
    conclusive = effect > allowed_mean
    ratio = _effect_ratio(canary, scores, base_scores)
    agree = mean <= allowed_mean and maximum <= tolerance.maximum
    if conclusive and not 1 / 2 <= ratio <= 3 / 2 and (agree or _differences(scores, base_scores)[0] <= allowed_mean):
        raise CanaryMismatch(
            f"the engine shows {ratio:.2f} times the adapter's effect of {effect:.3g} nats a token",
            code="adapter_not_applied",
            details={"effect_ratio": ratio, "base_mean": effect, "mean": mean},
        )
    if not agree:
        seen = f"; it shows {ratio:.2f} times the adapter's effect of {effect:.3g} nats a token" if conclusive else ""
        raise CanaryMismatch(
            f"engine and trainer disagree on the canary: mean {mean:.3g}, max {maximum:.3g} nats "
            f"(allowed {allowed_mean:.3g} and {tolerance.maximum:g} for {dtype}){seen}",
            details={
                "mean": mean,
                "max": maximum,
                "allowed_mean": allowed_mean,
                "allowed_max": tolerance.maximum,
                "effect_ratio": ratio,
                "base_mean": effect,
            },
        )
    return CanaryReport(
        mean_difference=mean,
        max_difference=maximum,
        tolerance=tolerance.maximum,
        mean_tolerance=allowed_mean,
        control_mean_difference=control,
        base_mean_difference=effect,
        effect_ratio=ratio,
        inconclusive=not conclusive,
        engine=engine,
        seconds=seconds,
    )


def _differences(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return mean and maximum of the absolute differences; both NaN when any number is not finite."""
    found = list(map(abs, _subtract(ours, theirs)))
    if not all(map(math.isfinite, found)):
        return math.nan, math.nan
    return math.fsum(found) / len(found), max(found)


def _effect_ratio(canary: Canary, scores: Sequence[Sequence[float]], base_scores: Sequence[Sequence[float]]) -> float:
    """Return the least-squares ratio of (adapter - base) in the engine to the same in the trainer; 1 for no effect."""
    trainers = _subtract(canary.logprobs, canary.base_logprobs)
    size = math.fsum(effect * effect for effect in trainers)
    seen = math.fsum(map(mul, trainers, _subtract(scores, base_scores)))
    return seen / size if size else 1.0


def _subtract(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> list[float]:
    return [a - b for row, other in zip(ours, theirs, strict=True) for a, b in zip(row, other, strict=True)]
