"""Money is whole nano-dollars: 1 USD = 1,000,000,000 nanos. Floats never touch it."""

from decimal import Decimal, InvalidOperation
from typing import NewType

Nanos = NewType("Nanos", int)

NANOS_PER_USD = 1_000_000_000
UNITS_PER_PRICE = 1_000_000  # prices are quoted per million units
MOST = 2**62  # nano-USD, 4.6 billion dollars: what a 64-bit column holds with room to add


def price_of(quantity: int, nanos_per_million: int) -> Nanos:
    """Return the price of ``quantity`` units (>= 0), rounded once, half to even.

    Raises:
        ValueError: a negative quantity or price.
    """
    _check(quantity, nanos_per_million)
    whole, rest = divmod(quantity * nanos_per_million, UNITS_PER_PRICE)
    half = UNITS_PER_PRICE // 2
    return Nanos(whole + (rest > half or (rest == half and whole % 2 == 1)))


def ceiling_of(quantity: int, nanos_per_million: int) -> Nanos:
    """Return the price rounded up: never less than ``price_of``.

    Raises:
        ValueError: a negative quantity or price.
    """
    _check(quantity, nanos_per_million)
    return Nanos(-(-quantity * nanos_per_million // UNITS_PER_PRICE))


def format_usd(nanos: int) -> str:
    """Return an exact dollar amount, e.g. ``$0.001234500``."""
    sign = "-" if nanos < 0 else ""
    dollars, fraction = divmod(abs(nanos), NANOS_PER_USD)
    return f"{sign}${dollars}.{fraction:09d}"


def parse_usd(text: str) -> Nanos:
    """Read a dollar amount with at most nine decimals: ``12.50``, ``-0.000000001``.

    Raises:
        ValueError: not such an amount.
    """
    try:
        nanos = Decimal(text) * NANOS_PER_USD
    except InvalidOperation:
        raise ValueError(f"{text[:40]!r} is not an amount in dollars") from None
    if not nanos.is_finite() or nanos != nanos.to_integral_value() or abs(nanos) > MOST:
        raise ValueError(f"{text[:40]!r} is not an amount in dollars with at most nine decimals")
    return Nanos(int(nanos))


def _check(quantity: int, nanos_per_million: int) -> None:
    if quantity < 0 or nanos_per_million < 0:
        raise ValueError(f"quantity and price must not be negative, got {quantity} and {nanos_per_million}")
