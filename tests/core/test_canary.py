"""The canary's verdict."""

import math

import pytest

from gateway.core.canary import TOLERANCES, Canary, CanaryMismatch, judge
from gateway.core.errors import Kind
from gateway.core.versions import CanaryReport

CANARY = Canary(
    tokens=((1, 2, 3), (4, 5)),
    logprobs=((-1.0, -2.0), (-3.0,)),
    base_logprobs=((-1.5, -2.5), (-3.5,)),
)


def verdict(scores: list[list[float]], dtype: str = "float32", canary: Canary = CANARY) -> CanaryReport:
    return judge(canary, scores, dtype=dtype, engine="http://e", seconds=0.5)


def test_an_engine_that_agrees_is_reported_with_its_numbers() -> None:
    report = verdict([[-1.0001, -2.0], [-3.0002]])

    assert report.max_difference == pytest.approx(2e-4)
    assert report.mean_difference == pytest.approx(1e-4)
    assert report.base_mean_difference == pytest.approx(0.5)
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


def test_an_engine_that_answers_as_the_base_model_is_found_out_within_a_wide_tolerance() -> None:
    canary = Canary(
        tokens=((1, 2, 3),), logprobs=((-1.0, -2.0),), base_logprobs=((-1.06, -2.06),)
    )  # the adapter moves less than bfloat16's maximum, more than its mean

    with pytest.raises(CanaryMismatch) as refused:
        verdict([[-1.04, -2.04]], dtype="bfloat16", canary=canary)

    assert refused.value.code == "adapter_not_applied"


@pytest.mark.parametrize(("logprob", "allowed"), [(-1.0, 0.0539), (-13.0, 0.1007)])
def test_bfloat16_may_be_further_off_where_log_probabilities_are_large(logprob: float, allowed: float) -> None:
    canary = Canary(tokens=((1, 2),), logprobs=((logprob,),), base_logprobs=((logprob - 1,),))

    assert verdict([[logprob + allowed - 1e-3]], dtype="bfloat16", canary=canary).inconclusive is False
    with pytest.raises(CanaryMismatch) as refused:
        verdict([[logprob + allowed + 1e-3]], dtype="bfloat16", canary=canary)
    assert refused.value.details["allowed_mean"] == pytest.approx(allowed, abs=1e-4)


def test_an_adapter_that_changes_nothing_yet_is_inconclusive() -> None:
    canary = Canary(tokens=((1, 2),), logprobs=((-1.0,),), base_logprobs=((-1.0,),))

    assert verdict([[-1.0]], canary=canary).inconclusive is True


def test_scores_of_another_shape_are_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        verdict([[-1.0], [-3.0]])
