"""Projects at an engine: a flood of one delays another by what is inside and no more than its own calls in turn."""

import asyncio

from gateway.core.ids import ProjectId
from gateway.engines.fair import FairGate

LOUD, QUIET = ProjectId("loud"), ProjectId("quiet")


class Engine:
    """Works off calls one by one, in the order in which the gate let them in."""

    def __init__(self, capacity: int) -> None:
        self.gate = FairGate(capacity)
        self.entered: list[ProjectId] = []
        self._leave: list[asyncio.Event] = []

    def ask(self, project: ProjectId, *, sequences: int = 1, tokens: int = 10) -> "asyncio.Task[None]":
        async def call() -> None:
            async with self.gate.turn(project, sequences=sequences, tokens=tokens):
                self.entered.append(project)
                leave = asyncio.Event()
                self._leave.append(leave)
                await leave.wait()

        return asyncio.create_task(call())

    async def work(self, calls: int) -> None:
        for _ in range(calls):
            self._leave.pop(0).set()
            await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_who_comes_into_a_flood_is_next() -> None:
    engine = Engine(4)
    flood = [engine.ask(LOUD) for _ in range(100)]
    await settle()
    assert len(engine.entered) == 4
    own = [engine.ask(QUIET) for _ in range(10)]
    await settle()
    await engine.work(30)
    after = engine.entered[4:]
    assert after[0] == QUIET
    waits = [index for index, project in enumerate(after) if project == QUIET]
    assert all(place <= 2 * number + 2 for number, place in enumerate(waits)), "at most two of the other's in between"
    assert len(waits) == 10
    for task in (*flood, *own):
        task.cancel()
    await asyncio.gather(*flood, *own, return_exceptions=True)
    assert engine.gate.waiting == 0


async def test_long_calls_count_for_what_they_take() -> None:
    engine = Engine(1)
    calls = [engine.ask(LOUD, tokens=1000) for _ in range(5)] + [engine.ask(QUIET, tokens=100) for _ in range(20)]
    await settle()
    await engine.work(12)
    assert engine.entered[:13].count(QUIET) >= 10
    for task in calls:
        task.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_a_call_that_gives_up_leaves_its_place() -> None:
    engine = Engine(1)
    first, second, third = engine.ask(LOUD), engine.ask(LOUD), engine.ask(QUIET)
    await settle()
    third.cancel()
    await settle()
    assert engine.gate.waiting == 1
    first.cancel()
    await settle()
    assert engine.entered == [LOUD, LOUD]
    second.cancel()
    await asyncio.gather(first, second, third, return_exceptions=True)
    assert engine.gate.waiting == 0


async def test_a_call_that_is_too_large_enters_alone() -> None:
    engine = Engine(4)
    small, large = engine.ask(QUIET, sequences=3), engine.ask(LOUD, sequences=9)
    await settle()
    assert engine.entered == [QUIET]
    await engine.work(1)
    assert engine.entered == [QUIET, LOUD]
    large.cancel()
    await asyncio.gather(small, large, return_exceptions=True)


async def test_a_caller_that_gave_up_before_its_turn_is_passed_over_and_costs_its_project_nothing() -> None:
    """The one inside leaves after a caller was cancelled and before that caller has noticed."""
    engine = Engine(1)
    inside = engine.ask(QUIET)
    given_up, long, last = engine.ask(LOUD, tokens=1000), engine.ask(LOUD, tokens=10), engine.ask(QUIET, tokens=500)
    await settle()
    inside.cancel()
    given_up.cancel()
    await settle()
    assert given_up.cancelled()
    await engine.work(1)  # the event of the one that was inside
    assert engine.entered == [QUIET, LOUD]
    long.cancel()
    await settle()
    assert engine.entered == [QUIET, LOUD, QUIET]
    last.cancel()
    await asyncio.gather(long, last, return_exceptions=True)
    assert engine.gate.waiting == 0
