import pickle
from datetime import UTC, datetime, timedelta

import pytest

from billing.prices import METERS, PriceList, PriceListError, UnknownPrice, shipped_prices

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)


def table(base_model: str, start: str, end: str | None = None, rate: int = 1_000_000) -> str:
    until = "" if end is None else f"until = {end}\n"
    rates = "".join(f"{meter} = {rate}\n" for meter in METERS)
    return f'[[price]]\nbase_model = "{base_model}"\nfrom = {start}\n{until}{rates}'


def test_the_price_valid_at_the_time_counts_from_its_first_instant_to_the_next_ones() -> None:
    prices = PriceList.parse(
        table("tiny", "2026-01-01T00:00:00Z", "2026-06-01T12:00:00Z", rate=1_000_000)
        + table("tiny", "2026-06-01T12:00:00Z", rate=2_000_000)
    )
    before = prices.cost_nanos(base_model="tiny", meter="train", quantity=10, at=NOON - timedelta(microseconds=1))
    after = prices.cost_nanos(base_model="tiny", meter="train", quantity=10, at=NOON)
    assert (before, after) == (10, 20)


def test_a_base_models_own_price_wins_over_the_default() -> None:
    prices = PriceList.parse(
        table("*", "2026-01-01T00:00:00Z", rate=9_000_000) + table("tiny", "2026-01-01T00:00:00Z", rate=1_000_000)
    )
    assert prices.cost_nanos(base_model="tiny", meter="sample", quantity=3, at=NOON) == 3
    assert prices.cost_nanos(base_model="other", meter="sample", quantity=3, at=NOON) == 27


def test_what_has_no_price_is_never_free() -> None:
    prices = PriceList.parse(table("tiny", "2026-01-01T00:00:00Z"))
    for base_model, meter, at in (
        ("other", "train", NOON),
        ("tiny", "unheard_of", NOON),
        ("tiny", "train", datetime(2025, 12, 31, tzinfo=UTC)),
    ):
        with pytest.raises(UnknownPrice) as refusal:
            prices.cost_nanos(base_model=base_model, meter=meter, quantity=0, at=at)
        assert isinstance(refusal.value, KeyError)
        assert str(pickle.loads(pickle.dumps(refusal.value))) == str(refusal.value)


def test_base_models_without_a_price_are_named_at_start() -> None:
    prices = PriceList.parse(table("tiny", "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"))
    prices.check_covers(["tiny"], at=datetime(2026, 1, 15, tzinfo=UTC))
    with pytest.raises(PriceListError, match="tiny: prefill; tiny: cached_prefill"):
        prices.check_covers(["tiny"], at=NOON)


def test_the_shipped_list_prices_every_meter_of_any_base_model() -> None:
    prices = PriceList.load(shipped_prices())
    prices.check_covers(["smollm2-135m-instruct", "anything-else"], at=NOON)
    assert prices.cost_nanos(base_model="smollm2-135m-instruct", meter="train", quantity=1000, at=NOON) == 120_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one"),
        ("[[price]", "not TOML"),
        ("[[prices]]\n", "unknown top-level entries: prices"),
        (table("tiny", "2026-01-01"), "date and time with offset"),
        (table("tiny", "2026-01-01T00:00:00"), "date and time with offset"),
        (table("tiny", "2026-01-01T00:00:00Z").replace("= 1000000", "= 0.5", 1), r"price\[0\].prefill must be a whole"),
        (table("tiny", "2026-01-01T00:00:00Z").replace("= 1000000", "= -1", 1), r"price\[0\].prefill must be a whole"),
        (table("tiny", "2026-01-01T00:00:00Z") + "extra = 1\n", r"price\[0\]: unknown entries: extra"),
        (table("tiny", "2026-01-01T00:00:00Z", "2026-01-01T00:00:00Z"), "until must be later than from"),
        (table("", "2026-01-01T00:00:00Z"), "base_model must be a name"),
        (table("a", "2026-01-01T00:00:00Z") + table("a", "2026-02-01T00:00:00Z"), "two prices of a overlap"),
    ],
)
def test_a_wrong_list_is_refused_and_says_where(text: str, message: str) -> None:
    with pytest.raises(PriceListError, match=message):
        PriceList.parse(text)
