"""The canary's verdict."""

import math
from operator import add

import pytest

from gateway.core.canary import TOLERANCES, Canary, CanaryMismatch, judge
from gateway.core.errors import Kind
from gateway.core.versions import CanaryReport

CANARY = Canary(
    tokens=((1, 2, 3), (4, 5)),
    logprobs=((-1.0, -2.0), (-3.0,)),
    base_logprobs=((-1.5, -2.5), (-3.5,)),
)


def verdict(
    scores: list[list[float]], dtype: str = "float32", canary: Canary = CANARY, off: float = 0.0
) -> CanaryReport:
    """Judge an engine whose scores of the base model are ``off`` by so much at each token."""
    base_scores = [[score + off for score in row] for row in canary.base_logprobs]
    return judge(canary, scores, base_scores, dtype=dtype, engine="http://e", seconds=0.5)


def test_an_engine_that_agrees_is_reported_with_its_numbers() -> None:
    report = verdict([[-1.0001, -2.0], [-3.0002]])

    assert report.max_difference == pytest.approx(2e-4)
    assert report.mean_difference == pytest.approx(1e-4)
    assert report.base_mean_difference == pytest.approx(0.5)
    assert report.effect_ratio == pytest.approx(1, abs=1e-3)
    assert (report.inconclusive, report.engine, report.seconds, report.tolerance) == (False, "http://e", 0.5, 1e-3)


@pytest.mark.parametrize(
    "scores",
    [
        [[-1.0, -2.0], [-3.0011]],  # one token too far
        [[-1.0003, -2.0003], [-3.0003]],  # all a little too far
        [[-1.0, math.nan], [-3.0]],
        [[-1.0, -math.inf], [-3.0]],
    ],
)
def test_an_engine_that_disagrees_is_a_mismatch(scores: list[list[float]]) -> None:
    with pytest.raises(CanaryMismatch) as refused:
        verdict(scores)

    assert (refused.value.kind, refused.value.code) == (Kind.INTERNAL, "canary_mismatch")
    assert refused.value.details["allowed_max"] == TOLERANCES["float32"].maximum


@pytest.mark.parametrize(("shown", "off"), [(0.0, 0.04), (0.45, 0.04), (1.55, -0.04), (2.0, -0.04)])
def test_an_engine_that_shows_another_effect_of_the_adapter_is_found_out_within_a_wide_tolerance(
    shown: float, off: float
) -> None:
    # The adapter moves more than the mean that is allowed, the engine is ``off`` whatever it runs.
    base, effects = (-1.0, -2.0, -4.0, -1.5), (0.09, 0.085, 0.1, 0.08)
    adapted = tuple(map(add, base, effects))
    canary = Canary(tokens=((1, 2, 3, 4, 5),), logprobs=(adapted,), base_logprobs=(base,))

    def scores(times: float) -> list[list[float]]:
        return [[one + times * effect + off for one, effect in zip(base, effects, strict=True)]]

    with pytest.raises(CanaryMismatch) as refused:
        verdict(scores(shown), dtype="bfloat16", canary=canary, off=off)

    assert (refused.value.code, refused.value.details["effect_ratio"]) == ("adapter_not_applied", pytest.approx(shown))
    assert verdict(scores(0.9), dtype="bfloat16", canary=canary, off=off).effect_ratio == pytest.approx(0.9)


@pytest.mark.parametrize(("off", "allowed"), [(0.0, 0.05), (0.02, 0.05), (-0.06, 0.12), (0.19, 0.38)])
def test_an_adapter_may_be_off_by_twice_what_the_base_model_is(off: float, allowed: float) -> None:
    canary = Canary(tokens=((1, 2),), logprobs=((-3.0,),), base_logprobs=((-4.0,),))

    report = verdict([[-3.0 + allowed - 1e-6]], dtype="bfloat16", canary=canary, off=off)
    assert (report.control_mean_difference, report.mean_tolerance) == pytest.approx((abs(off), allowed))
    with pytest.raises(CanaryMismatch) as refused:
        verdict([[-3.0 + allowed + 1e-6]], dtype="bfloat16", canary=canary, off=off)
    assert refused.value.details["allowed_mean"] == pytest.approx(allowed)


@pytest.mark.parametrize(("dtype", "off"), [("bfloat16", 0.21), ("float32", 9e-4), ("float32", math.nan)])
def test_an_engine_that_holds_another_base_model_is_a_mismatch_whatever_the_adapter_scores(
    dtype: str, off: float
) -> None:
    with pytest.raises(CanaryMismatch) as refused:
        verdict([[-1.0, -2.0], [-3.0]], dtype=dtype, off=off)

    assert refused.value.code == "base_mismatch"


def test_an_adapter_that_changes_nothing_yet_is_inconclusive() -> None:
    canary = Canary(tokens=((1, 2),), logprobs=((-1.0,),), base_logprobs=((-1.0,),))

    assert verdict([[-1.0]], canary=canary).inconclusive is True


def test_scores_of_another_shape_are_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        verdict([[-1.0], [-3.0]])
