"""Turns on a trainer: a flood from one project delays another by at most two of its own operations."""

from gateway.core.sessions import Session
from gateway.store import SqlDatabase
from tests.store.bench import Bench, HandClock, forward_backward, forward_result, open_bench

FLOOD, OWN = 40, 100  # tokens of an operation of the flood, and of the project that is not to wait


async def flood(bench: Bench, sessions: int, operations: int) -> None:
    for _ in range(sessions):
        session = await bench.open()
        for _ in range(operations):
            await bench.submit(session, forward_backward(FLOOD))


async def served(bench: Bench, sessions: list[Session], count: int) -> list[tuple[bool, int]]:
    """Serve ``count`` operations; return for each whether it was one of ``sessions`` and how many tokens it had."""
    own = {session.id for session in sessions}
    order: list[tuple[bool, int]] = []
    for _ in range(count):
        bench.clock.advance(1)
        work = await bench.claimed()
        await bench.finish(work, forward_result())
        mine = work.session.id in own
        order.append((mine, OWN if mine else FLOOD))
    return order


async def test_a_flood_delays_a_project_by_less_than_two_of_its_own_operations(
    database: SqlDatabase, clock: HandClock
) -> None:
    loud, quiet = await open_bench(database, clock, "loud"), await open_bench(database, clock, "quiet")
    await flood(loud, 5, 8)
    await served(loud, [], 4)
    session = await quiet.open()
    for _ in range(4):
        await quiet.submit(session, forward_backward(OWN))
    order = await served(quiet, [session], 14)

    waited, done = 0, 0
    for mine, tokens in order:
        if mine:
            done += 1
            assert waited <= done * OWN + FLOOD, "half of the trainer is its own"
        elif done < 4:
            waited += tokens
    assert done == 4
    assert order[0][0], "who was away is next"


async def test_a_project_with_many_sessions_shares_with_itself(database: SqlDatabase, clock: HandClock) -> None:
    many, one = await open_bench(database, clock, "many"), await open_bench(database, clock, "one")
    await flood(many, 10, 3)
    session = await one.open()
    for _ in range(10):
        await one.submit(session, forward_backward(FLOOD))
    order = await served(one, [session], 12)
    assert sum(mine for mine, _ in order) == 6


async def test_an_absence_saves_no_turns_up(database: SqlDatabase, clock: HandClock) -> None:
    busy, back = await open_bench(database, clock, "busy"), await open_bench(database, clock, "back")
    await flood(busy, 1, 30)
    session = await back.open()
    await back.submit(session, forward_backward(FLOOD))
    await served(back, [session], 20)
    for _ in range(5):
        await back.submit(session, forward_backward(FLOOD))
    order = await served(back, [session], 10)
    taken = [sum(mine for mine, _ in order[:length]) for length in range(11)]
    assert all(count <= length / 2 + 1 for length, count in enumerate(taken))
