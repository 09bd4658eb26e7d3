"""What a loop will cost, before it runs."""

from fastapi import APIRouter

from gateway.core.errors import Invalid
from gateway.core.usage import Meter
from gateway.wire.deps import Caller, CatalogDep, ClockDep, PricesDep
from gateway.wire.native.schemas.estimate import EstimateCreate, EstimateLine, EstimateRead
from gateway.wire.routes import DialectRoute

router = APIRouter(route_class=DialectRoute, tags=["usage"])

MAX_UNITS = 10**18
_MILLION = 1_000_000


@router.post("/estimate")
async def estimate(
    body: EstimateCreate, principal: Caller, catalog: CatalogDep, prices: PricesDep, clock: ClockDep
) -> EstimateRead:
    """Price a planned loop at today's prices. Nothing is run, held or recorded."""
    model, now = catalog.get(body.base_model), clock.now()
    step = {
        Meter.PREFILL: body.prompts * body.prompt_tokens,
        Meter.SAMPLE: body.prompts * body.samples * body.sample_tokens,
        Meter.TRAIN: body.batch_size * body.datum_tokens * body.passes,
    }
    if body.prompts and body.prompt_tokens + body.sample_tokens > model.context_length:
        raise Invalid(
            f"prompt_tokens plus sample_tokens exceed the context of {model.context_length} tokens",
            code="context_length_exceeded",
            field="sample_tokens",
            details={"limit": model.context_length, "got": body.prompt_tokens + body.sample_tokens},
        )
    if max(step.values()) * body.steps > MAX_UNITS:
        raise Invalid(f"the loop is larger than {MAX_UNITS} tokens", field="steps", details={"limit": MAX_UNITS})

    def price(meter: Meter, quantity: int) -> int:
        return prices.cost_nanos(base_model=model.name, meter=meter, quantity=quantity, at=now)

    lines = [
        EstimateLine(
            meter=meter.value,
            quantity=quantity * body.steps,
            rate_nanos=price(meter, _MILLION),
            cost_nanos=price(meter, quantity * body.steps),
        )
        for meter, quantity in step.items()
        if quantity
    ]
    return EstimateRead(
        base_model=model.name,
        lines=lines,
        step_cost_nanos=sum(price(meter, quantity) for meter, quantity in step.items()),
        cost_nanos=sum(line.cost_nanos for line in lines),
    )
