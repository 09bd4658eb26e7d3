"""What usage costs. A fact is priced at its own time and rounded once, as its posting will be."""

from collections.abc import Iterable, Mapping
from datetime import datetime

from gateway.core.ledger import WorstCase
from gateway.core.ports import Prices
from gateway.core.usage import HOUSE, Meter, UsageFact


def cost_nanos(prices: Prices, facts: Iterable[UsageFact]) -> int:
    """Return the sum of the facts' prices in nano-USD; the house pays nothing."""
    return sum(
        prices.cost_nanos(base_model=fact.base_model, meter=fact.meter, quantity=fact.quantity, at=fact.at)
        for fact in facts
        if fact.project_id != HOUSE
    )


def worst_cost_nanos(prices: Prices, work: WorstCase, *, at: datetime) -> int:
    """Return what ``work`` costs at most, whichever part of its prompt an engine finds in its cache."""
    if work.project_id == HOUSE:
        return 0

    def most(meter: Meter, quantity: int) -> int:
        return prices.most_nanos(base_model=work.base_model, meter=meter, quantity=quantity, at=at) if quantity else 0

    prompt = max(most(Meter.PREFILL, work.prompt), most(Meter.CACHED_PREFILL, work.prompt))
    split = 1 if work.prompt > 1 else 0  # a prompt billed in two parts is rounded twice
    return prompt + split + most(Meter.SAMPLE, work.sampled) + most(Meter.TRAIN, work.trained)


def quantities(facts: Iterable[UsageFact]) -> Mapping[str, int]:
    """Return what was consumed by meter; what the house consumed beside it is not the caller's."""
    return {fact.meter.value: fact.quantity for fact in facts if fact.project_id != HOUSE}
