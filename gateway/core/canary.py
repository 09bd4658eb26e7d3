"""The canary: proof that an engine computes with a version what the trainer computed.

The trainer writes token sequences and its own log-probabilities for them, with the adapter and without, into the
version's manifest. The gate scores the same tokens through the engine and compares, in nats per token.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    """Largest differences that count as agreement, in nats.

    Rounding errors grow with the logits: ``relative`` times the mean absolute log-probability is added to ``mean``.
    """

    mean: float
    maximum: float
    relative: float = 0.0


# Measured between a torch trainer and vLLM on one machine: float32 3e-5 at most; bfloat16 0.08 at most on 15 tokens of
# text, mean 0.053 and at most 0.16 on random tokens. bfloat16 keeps 8 bits, float16 11.
TOLERANCES: Mapping[str, Tolerance] = {
    "float32": Tolerance(mean=2e-4, maximum=1e-3),
    "bfloat16": Tolerance(mean=0.05, maximum=1.0, relative=2**-8),
    "float16": Tolerance(mean=0.02, maximum=0.5, relative=2**-11),
}


class CanaryMismatch(GatewayError):
    """The engine does not compute what the trainer computed; the version must not be served."""

    kind = Kind.INTERNAL
    default_code = "canary_mismatch"


def judge(
    canary: Canary,
    engine_logprobs: Sequence[Sequence[float]],
    *,
    dtype: str,
    engine: str,
    seconds: float,
) -> CanaryReport:
    """Compare the engine's scores of the canary (same shape as ``canary.logprobs``) with the trainer's.

    When adapter and base differ by more than the tolerance in the trainer, the engine's scores must also be nearer
    to the adapter's than to the base's: an adapter that bound to nothing is found here. When they do not differ, the
    report is ``inconclusive``.

    Raises:
        CanaryMismatch: carries the measured numbers.
    """
    tolerance = TOLERANCES[dtype]
    differences = [
        abs(ours - theirs)
        for expected, scored in zip(canary.logprobs, engine_logprobs, strict=True)
        for ours, theirs in zip(expected, scored, strict=True)
    ]
    to_base = [
        abs(ours - base)
        for expected, bases in zip(canary.logprobs, canary.base_logprobs, strict=True)
        for ours, base in zip(expected, bases, strict=True)
    ]
    size = sum(abs(value) for expected in canary.logprobs for value in expected) / len(differences)
    allowed_mean = tolerance.mean + tolerance.relative * size
    mean, maximum = sum(differences) / len(differences), max(differences)
    base_mean = sum(to_base) / len(to_base)
    if not (math.isfinite(mean) and mean <= allowed_mean and maximum <= tolerance.maximum):
        raise CanaryMismatch(
            f"engine and trainer disagree on the canary: mean {mean:.3g}, max {maximum:.3g} nats "
            f"(allowed {allowed_mean:.3g} and {tolerance.maximum:g} for {dtype})",
            details={"mean": mean, "max": maximum, "allowed_mean": allowed_mean, "allowed_max": tolerance.maximum},
        )
    conclusive = base_mean > allowed_mean
    if conclusive and mean > base_mean / 2:
        raise CanaryMismatch(
            f"the engine answers as the base model: mean difference to the adapter {mean:.3g}, "
            f"adapter to base {base_mean:.3g} nats",
            code="adapter_not_applied",
            details={"mean": mean, "base_mean": base_mean},
        )
    return CanaryReport(
        mean_difference=mean,
        max_difference=maximum,
        tolerance=tolerance.maximum,
        base_mean_difference=base_mean,
        inconclusive=not conclusive,
        engine=engine,
        seconds=seconds,
    )
