"""Buckets: they fill evenly, never hold more than a minute's worth, and owe what was taken beyond that."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import Invalid
from gateway.core.limits import WINDOW_US, Allowance, Bucket, Limit

NOW = 10**15


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(0, WINDOW_US))
def test_a_full_bucket_gives_its_limit_and_refills_evenly(limit: int, amount: int, later: int) -> None:
    amount = min(amount, limit)
    bucket = Bucket(limit=limit, full_at=0, now=NOW)
    assert bucket.left == limit
    after = Bucket(limit=limit, full_at=bucket.taken(amount), now=NOW)
    assert after.left in (limit - amount, limit - amount - 1)  # a part of a unit is never lent
    refilled = Bucket(limit=limit, full_at=after.full_at, now=NOW + later).left
    assert abs(refilled - min(limit, limit - amount + later * limit // WINDOW_US)) <= 1


def test_what_was_taken_beyond_the_limit_is_owed() -> None:
    bucket = Bucket(limit=60, full_at=Bucket(limit=60, full_at=0, now=NOW).taken(90), now=NOW)
    assert bucket.left == -30
    assert bucket.wait_s() == 31
    assert Bucket(limit=60, full_at=bucket.full_at, now=NOW + 31_000_000).left == 1


def test_a_value_above_a_limit_is_named_with_both_numbers() -> None:
    allowance = Allowance(limits={Limit.SAMPLES: 2})
    allowance.check(Limit.SAMPLES, 2, name="n")
    allowance.check(Limit.STOPS, 99, name="stop")
    with pytest.raises(Invalid, match="n must be at most 2") as refused:
        allowance.check(Limit.SAMPLES, 3, name="n")
    assert (refused.value.field, refused.value.details) == ("n", {"limit": 2, "got": 3})
