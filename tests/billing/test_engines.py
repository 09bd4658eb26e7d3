"""Engine counters against facts: equal while the engine lives; what a dead gateway left is told apart from a leak."""

from billing import engines, holds
from billing.engines import Counters, Tokens
from gateway.core.usage import HOUSE, Meter
from tests.billing.books import OWNER, Books
from tests.store.bench import BASE

ENGINE = "http://127.0.0.1:8101"
METRICS = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 120.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 3.0
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0",model_name="m"} 45.0
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.7e9
"""


def counters(books: Books, prompt: int, generation: int) -> Counters:
    return Counters(prompt_tokens=prompt, generation_tokens=generation, unfinished=0, started_at=books.now - 60_000_000)


def test_counters_add_up_over_the_engines_of_a_server_which_began_up_to_a_second_later_than_it_says() -> None:
    assert engines.parse_counters(METRICS) == Counters(
        prompt_tokens=123, generation_tokens=45, unfinished=3, started_at=1_700_000_001_000_000
    )
    assert engines.parse_counters("vllm:prompt_tokens_total 1\n") is None


async def test_an_engine_counts_what_its_facts_say_the_houses_included(books: Books) -> None:
    await books.add(
        books.fact("smp-1", 10, Meter.PREFILL, engine=ENGINE),
        books.fact("smp-1", 6, Meter.CACHED_PREFILL, engine=ENGINE),
        books.fact("smp-1", 9, Meter.SAMPLE, engine=ENGINE),
        books.fact("smp-1-house", 32, Meter.PREFILL, engine=ENGINE, project_id=HOUSE),
        books.fact("smp-2", 5, Meter.SAMPLE, engine="http://other"),
    )
    said = counters(books, 48, 9)
    verdict = await books.look(lambda c: engines.judge(c, ENGINE, BASE, said))
    assert (verdict.surplus, verdict.explained) == (Tokens(prompt=0, generation=0), True)
    leak = counters(books, 48, 10)
    assert not (await books.look(lambda c: engines.judge(c, ENGINE, BASE, leak))).explained


async def test_tokens_of_a_call_that_its_gateway_died_in_are_explained_up_to_its_worst_case_once(books: Books) -> None:
    await books.database.change(lambda c: holds.beat(c, OWNER, at=books.now))
    await books.hold("smp-1", sampled=8)
    books.clock.advance(31)
    await books.database.change(lambda c: holds.release_dead(c, at=books.now))

    async def judged(generation: int) -> bool:
        said = counters(books, 0, generation)
        return (await books.look(lambda c: engines.judge(c, ENGINE, BASE, said))).explained

    assert [await judged(8), await judged(9)] == [True, False]
    await books.add(
        books.fact("lost-1", 5, Meter.SAMPLE, engine=ENGINE, project_id=HOUSE),
    )
    assert [await judged(5), await judged(8), await judged(9)] == [True, True, False]


async def test_a_reading_that_no_longer_fits_its_facts_is_found(books: Books) -> None:
    await books.add(books.fact("smp-1", 9, Meter.SAMPLE, engine=ENGINE))
    said = counters(books, 0, 9)
    await books.database.change(lambda c: engines.keep_reading(c, ENGINE, BASE, said, at=books.now))
    books.clock.advance(1)
    await books.add(books.fact("smp-2", 4, Meter.SAMPLE, engine=ENGINE))
    assert books.report().differences == []

    wrong = counters(books, 0, 8)
    await books.database.change(lambda c: engines.keep_reading(c, ENGINE, BASE, wrong, at=books.now))
    assert [difference.check for difference in books.report().differences] == ["engines"]
