"""The price list: what a million units of each meter cost, per base model, and from when to when.

A TOML file with one ``[[price]]`` table per base model and period::

    [[price]]
    base_model = "smollm2-135m-instruct"    # or "*": any base model without a price of its own
    from = 2026-01-01T00:00:00Z              # first instant, inclusive
    until = 2027-01-01T00:00:00Z             # exclusive; leave out for "until further notice"
    prefill = 20_000_000                     # nano-USD per million tokens; 1 USD = 1_000_000_000
    cached_prefill = 5_000_000
    sample = 60_000_000
    train = 120_000_000
    storage = 100_000_000                    # per GB-month, see ``billing.storage``

Two periods of one base model must not overlap. A base model's own price at an instant wins over ``"*"``, whole: the
two are never mixed. What has no price raises; nothing is ever free by omission.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from billing.money import Nanos, price_of

ANY_MODEL = "*"
METERS = ("prefill", "cached_prefill", "sample", "train", "storage")


class PriceListError(ValueError):
    """The price list is wrong or incomplete; the message says where."""


class UnknownPrice(KeyError):
    """Nothing is quoted for this base model and meter at this time."""

    def __init__(self, base_model: str, meter: str, at: datetime) -> None:
        self.base_model = base_model
        self.meter = meter
        self.at = at
        super().__init__(f"no price for {meter} on {base_model} at {at.isoformat()}")

    def __reduce__(self) -> tuple[object, ...]:
        return (UnknownPrice, (self.base_model, self.meter, self.at))


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Prices of one base model from ``start`` (inclusive) to ``end`` (exclusive; None: open), nanos per million."""

    base_model: str
    start: datetime
    end: datetime | None
    nanos_per_million: Mapping[str, int]

    def covers(self, at: datetime) -> bool:
        return self.start <= at and (self.end is None or at < self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceList:
    """All prices. Entries of one base model do not overlap."""

    prices: tuple[Price, ...]

    @classmethod
    def load(cls, path: Path) -> "PriceList":
        """Read a price list from ``path``.

        Raises:
            PriceListError: see ``parse``.
            OSError: the file cannot be read.
        """
        return cls.parse(path.read_text(encoding="utf-8"))

    @classmethod
    def parse(cls, text: str) -> "PriceList":
        """Read a price list.

        Raises:
            PriceListError: not TOML, an unknown or missing entry, a wrong type, overlapping periods.
        """
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise PriceListError(f"price list is not TOML: {error}") from None
        if unknown := set(document) - {"price"}:
            raise PriceListError(f"unknown top-level entries: {', '.join(sorted(unknown))}")
        tables = document.get("price", [])
        if not isinstance(tables, list) or not tables:
            raise PriceListError("the price list needs at least one [[price]] table")
        prices = tuple(_price(index, table) for index, table in enumerate(tables))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        _refuse_overlaps(prices)
        return cls(prices=prices)

    def cost_nanos(self, *, base_model: str, meter: str, quantity: int, at: datetime) -> Nanos:
        """Return the price of ``quantity`` units at the price valid at ``at``, rounded once, half to even.

        Raises:
            UnknownPrice: (a KeyError) nothing is quoted.
        """
        return price_of(quantity, self.rate(base_model, meter, at))

    def rate(self, base_model: str, meter: str, at: datetime) -> int:
        """Return nano-USD per million units at ``at``.

        Raises:
            UnknownPrice: (a KeyError) nothing is quoted.
        """
        price = self._valid(base_model, at)
        if price is None or meter not in price.nanos_per_million:
            raise UnknownPrice(base_model, meter, at)
        return price.nanos_per_million[meter]

    def highest_rate(self, base_model: str, meter: str, start: datetime, end: datetime) -> int:
        """Return the highest rate from ``start`` to ``end``: work that takes until then costs no more.

        Raises:
            UnknownPrice: (a KeyError) nothing is quoted at one of the instants.
        """
        changes = [at for at in self.changes() if start < at <= end]
        return max(self.rate(base_model, meter, at) for at in [start, *changes])

    def changes(self) -> list[datetime]:
        """Return every instant at which some price begins or ends, in order."""
        return sorted({at for price in self.prices for at in (price.start, price.end) if at is not None})

    def first_difference(self, other: "PriceList") -> datetime | None:
        """Return the first instant from which the two lists quote something else, None when they never do."""
        names = {price.base_model for price in (*self.prices, *other.prices)}
        for at in sorted({*self.changes(), *other.changes()}):
            for name in sorted(names):
                ours, theirs = self._valid(name, at), other._valid(name, at)
                if (ours and ours.nanos_per_million) != (theirs and theirs.nanos_per_million):
                    return at
        return None

    def check_covers(self, base_models: Iterable[str], *, at: datetime) -> None:
        """Check that every meter of every base model has a price at ``at``.

        Raises:
            PriceListError: names each base model and meter without one.
        """
        missing = [
            f"{name}: {meter}"
            for name in base_models
            for meter in METERS
            if (price := self._valid(name, at)) is None or meter not in price.nanos_per_million
        ]
        if missing:
            raise PriceListError(f"no price at {at.isoformat()} for {'; '.join(missing)}")

    def _valid(self, base_model: str, at: datetime) -> Price | None:
        for name in (base_model, ANY_MODEL):
            for price in self.prices:
                if price.base_model == name and price.covers(at):
                    return price
        return None


def shipped_prices() -> Path:
    """Return the path of the example price list that ships with this package."""
    return Path(__file__).with_name("prices.toml")


def _price(index: int, table: Any) -> Price:
    where = f"price[{index}]"
    if not isinstance(table, dict):
        raise PriceListError(f"{where} must be a table")
    entries: dict[str, Any] = dict(table)  # pyright: ignore[reportUnknownArgumentType]
    if unknown := set(entries) - {"base_model", "from", "until", *METERS}:
        raise PriceListError(f"{where}: unknown entries: {', '.join(sorted(unknown))}")
    base_model = entries.get("base_model")
    if not isinstance(base_model, str) or not base_model:
        raise PriceListError(f'{where}.base_model must be a name or "*"')
    start, end = _instant(where, "from", entries.get("from")), None
    if "until" in entries:
        end = _instant(where, "until", entries["until"])
        if end <= start:
            raise PriceListError(f"{where}: until must be later than from")
    rates: dict[str, int] = {}
    for meter in METERS:
        rate = entries.get(meter)
        if not isinstance(rate, int) or isinstance(rate, bool) or rate < 0:
            raise PriceListError(f"{where}.{meter} must be a whole number of nano-USD per million units, at least 0")
        rates[meter] = rate
    return Price(base_model=base_model, start=start, end=end, nanos_per_million=rates)


def _instant(where: str, name: str, value: Any) -> datetime:
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise PriceListError(f"{where}.{name} must be a date and time with offset, e.g. 2026-01-01T00:00:00Z")
    return value


def _refuse_overlaps(prices: Iterable[Price]) -> None:
    ordered = sorted(prices, key=lambda price: (price.base_model, price.start))
    for earlier, later in pairwise(ordered):
        if earlier.base_model == later.base_model and (earlier.end is None or earlier.end > later.start):
            raise PriceListError(
                f"two prices of {later.base_model} overlap: from {earlier.start.isoformat()} and "
                f"from {later.start.isoformat()}"
            )
