"""Money is whole nano-dollars: 1 USD = 1,000,000,000 nanos. Floats never touch it."""

from typing import NewType

Nanos = NewType("Nanos", int)

NANOS_PER_USD = 1_000_000_000
UNITS_PER_PRICE = 1_000_000  # prices are quoted per million units


def price_of(quantity: int, nanos_per_million: int) -> Nanos:
    """Return the price of ``quantity`` units (>= 0), rounded once, half to even.

    Raises:
        ValueError: a negative quantity or price.
    """
    if quantity < 0 or nanos_per_million < 0:
        raise ValueError(f"quantity and price must not be negative, got {quantity} and {nanos_per_million}")
    whole, rest = divmod(quantity * nanos_per_million, UNITS_PER_PRICE)
    half = UNITS_PER_PRICE // 2
    return Nanos(whole + (rest > half or (rest == half and whole % 2 == 1)))


def format_usd(nanos: int) -> str:
    """Return an exact dollar amount, e.g. ``$0.001234500``."""
    sign = "-" if nanos < 0 else ""
    dollars, fraction = divmod(abs(nanos), NANOS_PER_USD)
    return f"{sign}${dollars}.{fraction:09d}"
