"""Budgets and holds on both databases: what is set aside counts at once, and never twice."""

import asyncio

import pytest
from sqlalchemy import select

from billing import holds
from billing.moments import micros
from billing.money import price_of
from billing.tables import holds as holds_table
from billing.tables import lost_calls
from gateway.core.errors import Kind
from gateway.core.ledger import Budget, BudgetPeriod, BudgetScope, OutOfBudget
from gateway.core.payloads import ForwardBackward
from gateway.core.results import Failure
from gateway.core.usage import Meter
from tests.billing.books import RATES, Books
from tests.store.bench import forward_backward, forward_result

CALL = 10  # sampled tokens of one call
PRICE = price_of(CALL, RATES["sample"])


async def limit(
    books: Books,
    hard: int | None,
    *,
    soft: int | None = None,
    scope: BudgetScope = BudgetScope.PROJECT,
    scope_id: str | None = None,
    period: BudgetPeriod = BudgetPeriod.TOTAL,
) -> None:
    budget = Budget(
        scope=scope,
        scope_id=scope_id or books.project_id,
        project_id=books.project_id,
        period=period,
        hard_nanos=hard,
        soft_nanos=soft,
    )
    async with books.database.write() as unit:
        await unit.ledger.set_budget(budget)


async def used(books: Books) -> int:
    async with books.database.read() as unit:
        return (await unit.ledger.budgets(books.project_id))[0].used_nanos


async def finish(books: Books, source: str, tokens: int = CALL) -> None:
    fact = books.fact(source, tokens, Meter.SAMPLE)
    async with books.database.write() as unit:
        await unit.usage.add([fact])
        await unit.ledger.settle(source, [fact])


async def open_holds(books: Books) -> list[str]:
    return await books.look(lambda c: sorted(c.execute(select(holds_table.c.source)).scalars()))


async def test_what_is_held_counts_until_it_is_settled_and_then_what_it_did_cost(books: Books) -> None:
    await limit(books, 3 * PRICE + 2)
    await books.hold("smp-1", sampled=CALL)
    held = await used(books)
    await finish(books, "smp-1", 4)
    settled = await used(books)
    await books.post_all()

    cost = price_of(4, RATES["sample"])
    assert (held, settled, await used(books)) == (PRICE + 1, cost, cost)  # a hold is rounded up
    assert await open_holds(books) == []


async def test_a_request_that_could_pass_the_budget_is_refused_and_holds_nothing(books: Books) -> None:
    await limit(books, 2 * PRICE)
    await books.hold("smp-1", sampled=CALL)
    with pytest.raises(OutOfBudget) as refused:
        await books.hold("smp-2", sampled=CALL)

    assert (refused.value.kind, refused.value.code) == (Kind.OUT_OF_BUDGET, "insufficient_quota")
    assert refused.value.details["limit"] == 2 * PRICE
    assert await open_holds(books) == ["smp-1"]


@pytest.mark.parametrize("scope", list(BudgetScope))
async def test_a_budget_binds_its_project_key_or_session_alone(books: Books, scope: BudgetScope) -> None:
    mine = {BudgetScope.PROJECT: books.project_id, BudgetScope.KEY: books.key_id, BudgetScope.SESSION: "sess-1"}[scope]
    await limit(books, 0, scope=scope, scope_id=mine)

    with pytest.raises(OutOfBudget):
        await books.hold("smp-1", sampled=1, session_id="sess-1")
    if scope is BudgetScope.SESSION:
        await books.hold("smp-2", sampled=1, session_id="sess-2")
        await books.hold("smp-3", sampled=1)
    books.bench.key_id = type(books.key_id)("other")
    if scope is BudgetScope.KEY:
        await books.hold("smp-4", sampled=1, session_id="sess-1")


async def test_the_soft_limit_warns_in_every_answer_and_is_an_event_once(books: Books) -> None:
    await limit(books, None, soft=PRICE)

    async def notices(source: str) -> int:
        async with books.database.write() as unit:
            await unit.ledger.hold(books.worst_case(source, sampled=CALL))
            return len(unit.ledger.notices)

    assert [await notices("smp-1"), await notices("smp-2")] == [1, 1]


async def test_a_monthly_budget_starts_afresh(books: Books) -> None:
    await limit(books, PRICE + 1, period=BudgetPeriod.MONTH)
    await books.hold("smp-1", sampled=CALL)
    await finish(books, "smp-1")
    await books.post_all()
    with pytest.raises(OutOfBudget):
        await books.hold("smp-2", sampled=CALL)
    books.clock.advance(31 * 86_400)
    await books.hold("smp-2", sampled=CALL)


@pytest.mark.parametrize("callers", [16, 64])
async def test_callers_that_race_never_spend_more_than_the_budget(books: Books, callers: int) -> None:
    await limit(books, 3 * (PRICE + 1))

    async def call(number: int) -> bool:
        try:
            await books.hold(f"smp-{number}", sampled=CALL)
        except OutOfBudget:
            return False
        await finish(books, f"smp-{number}")
        if number % 3 == 0:
            await books.post()
        return True

    served = await asyncio.gather(*(call(number) for number in range(callers)))
    await books.post_all()
    assert served.count(True) == 3
    assert await used(books) == 3 * PRICE
    assert books.report().differences == []


async def test_the_holds_of_a_dead_process_are_released_and_remembered(books: Books) -> None:
    await limit(books, 10 * PRICE)
    await books.database.change(lambda c: holds.beat(c, "gateway-a", at=books.now))
    await books.hold("smp-1", sampled=CALL)
    await books.hold("smp-2", sampled=CALL)
    await finish(books, "smp-2")

    def sweep() -> "asyncio.Future[object]":
        return books.database.change(lambda c: holds.release_dead(c, at=books.now))  # pyright: ignore[reportReturnType]

    books.clock.advance(29)
    assert await sweep() == []
    books.clock.advance(2)
    assert await sweep() == ["smp-1"]
    assert await used(books) == PRICE
    lost = await books.look(lambda c: [tuple(row) for row in c.execute(select(lost_calls))])
    assert lost == [("smp-1", "tiny", 0, CALL, micros(books.clock.now()) - 31_000_000)]


async def test_a_call_that_was_settled_cannot_be_lost_afterwards(books: Books) -> None:
    await limit(books, 10 * PRICE)
    for number in (1, 2):
        await books.hold(f"smp-{number}", sampled=CALL)
    await finish(books, "smp-1")
    for number in (1, 2):  # as who does not know whether its commit came through
        await books.database.jot(lambda unit, source=f"smp-{number}": unit.ledger.lose(source))

    assert await used(books) == PRICE
    assert await books.look(lambda c: list(c.execute(select(lost_calls.c.source)).scalars())) == ["smp-2"]


async def test_an_operation_holds_from_its_submission_to_its_end(books: Books) -> None:
    await limit(books, price_of(8, RATES["train"]))
    session = await books.bench.open()
    first = await books.bench.submit(session, forward_backward(4))
    await books.bench.submit(session, forward_backward(4, first=2))
    with pytest.raises(OutOfBudget):
        await books.bench.submit(session, forward_backward(4, first=3))

    work = await books.bench.claimed()
    assert isinstance(work.payload, ForwardBackward)
    fact = books.fact(first.id, 4, Meter.TRAIN, session_id=session.id)
    await books.bench.finish(work, forward_result(), fact)
    await books.post_all()
    failed = await books.bench.claimed()
    await books.bench.finish(failed, Failure(kind=Kind.INVALID, code="non_finite_loss", message="no"))
    await books.database.change(holds.release_ended)

    assert await open_holds(books) == []
    assert await used(books) == price_of(4, RATES["train"])
    assert books.report().differences == []


async def test_a_submission_that_is_refused_for_money_queues_nothing(books: Books) -> None:
    await limit(books, 0)
    session = await books.bench.open()
    with pytest.raises(OutOfBudget):
        await books.bench.submit(session, forward_backward(4), seq=1)
    async with books.database.read() as unit:
        assert await unit.operations.by_seq(session.id, 1) is None
    await limit(books, None, soft=1)
    assert (await books.bench.submit(session, forward_backward(4), seq=1)).seq == 1
