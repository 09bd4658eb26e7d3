from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.money import format_usd, price_of


@given(st.integers(0, 10**12), st.integers(0, 10**12))
def test_a_price_is_within_half_a_nano_of_the_exact_amount(quantity: int, rate: int) -> None:
    exact = Fraction(quantity * rate, 1_000_000)
    assert abs(price_of(quantity, rate) - exact) <= Fraction(1, 2)


@pytest.mark.parametrize(
    ("quantity", "rate", "nanos"),
    [(1, 500_000, 0), (3, 500_000, 2), (5, 500_000, 2), (7, 500_000, 4), (1, 500_001, 1), (1, 499_999, 0)],
)
def test_half_a_nano_goes_to_the_even_neighbour(quantity: int, rate: int, nanos: int) -> None:
    assert price_of(quantity, rate) == nanos


@pytest.mark.parametrize(("quantity", "rate"), [(-1, 1), (1, -1)])
def test_negative_amounts_are_refused(quantity: int, rate: int) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        price_of(quantity, rate)


def test_dollars_are_written_to_the_nano() -> None:
    assert format_usd(1_234_500) == "$0.001234500"
    assert format_usd(-2_000_000_001) == "-$2.000000001"
