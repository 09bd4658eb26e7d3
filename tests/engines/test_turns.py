"""Who may use an engine's slots: never too many versions at once, and nobody waits for ever."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from gateway.core.ids import SessionId, VersionId
from gateway.core.versions import CanaryReport, Occasion
from gateway.engines.vllm_adapters import LoadedVersions, Turns

A, B, C = VersionId("ver-a"), VersionId("ver-b"), VersionId("ver-c")
S, T = SessionId("sess-s"), SessionId("sess-t")


class Visitors:
    """Requests that stay until told to leave; ``entered`` lists versions in the order they got in."""

    def __init__(self, turns: Turns) -> None:
        self.entered: list[VersionId] = []
        self._turns = turns

    async def come(
        self, version_id: VersionId, session_id: SessionId | None = None
    ) -> tuple["asyncio.Task[None]", asyncio.Event]:
        leave = asyncio.Event()
        owner = session_id or S

        async def visit() -> None:
            async with self._turns.turn(version_id, owner):
                self.entered.append(version_id)
                await leave.wait()

        task = asyncio.create_task(visit())
        await settle()
        return task, leave


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_version_holds_any_number_of_turns_and_others_wait() -> None:
    visitors = Visitors(Turns(1))
    first, second, other = [await visitors.come(version) for version in (A, A, B)]
    assert visitors.entered == [A, A]

    first[1].set()
    await settle()
    assert visitors.entered == [A, A]
    second[1].set()
    await settle()
    assert visitors.entered == [A, A, B]
    other[1].set()
    await asyncio.gather(first[0], second[0], other[0])


async def test_a_busy_version_cannot_keep_others_out() -> None:
    visitors = Visitors(Turns(1))
    early = await visitors.come(A)
    waiting = await visitors.come(B)
    late = await visitors.come(A)  # A is in use, yet B came first

    early[1].set()
    await settle()
    assert visitors.entered == [A, B]
    waiting[1].set()
    await settle()
    assert visitors.entered == [A, B, A]
    late[1].set()
    await asyncio.gather(early[0], waiting[0], late[0])


async def test_a_version_enters_with_all_its_waiting_requests() -> None:
    visitors = Visitors(Turns(1))
    early = await visitors.come(A)
    waiting = [await visitors.come(version) for version in (B, C, B)]

    early[1].set()
    await settle()

    assert visitors.entered == [A, B, B]
    for _, leave in waiting:
        leave.set()
    await asyncio.gather(early[0], *(task for task, _ in waiting))
    assert visitors.entered == [A, B, B, C]


async def test_a_cancelled_waiter_leaves_no_trace() -> None:
    turns = Turns(1)
    visitors = Visitors(turns)
    early = await visitors.come(A)
    given_up, _ = await visitors.come(B)
    given_up.cancel()
    late = await visitors.come(A)

    assert visitors.entered == [A, A]
    early[1].set()
    late[1].set()
    await asyncio.gather(early[0], late[0])
    assert not turns.in_use(A)
    assert not turns.in_use(B)


@pytest.mark.parametrize("limit", [1, 2, 3])
async def test_never_more_versions_than_the_limit_whatever_comes_and_goes(limit: int) -> None:
    turns, rng, using = Turns(limit), random.Random(limit), list[VersionId]()
    most = 0

    async def visit(version_id: VersionId, steps: int) -> None:
        nonlocal most
        async with turns.turn(version_id, S):
            using.append(version_id)
            most = max(most, len(set(using)))
            try:
                for _ in range(steps):
                    await asyncio.sleep(0)
            finally:
                using.remove(version_id)

    visits: list[asyncio.Task[None]] = []
    for _ in range(400):
        visits.append(asyncio.create_task(visit(VersionId(f"ver-{rng.randrange(7)}"), rng.randrange(5))))
        if rng.random() < 0.2:
            rng.choice(visits).cancel()
        await asyncio.sleep(0)
    outcomes = await asyncio.gather(*visits, return_exceptions=True)

    assert most == limit
    assert any(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    assert not any(turns.in_use(VersionId(f"ver-{number}")) for number in range(7))


REPORT = CanaryReport(
    mean_difference=0.0,
    max_difference=0.0,
    tolerance=1e-3,
    mean_tolerance=2e-4,
    control_mean_difference=0.0,
    base_mean_difference=1.0,
    effect_ratio=1.0,
    inconclusive=False,
    engine="http://127.0.0.1:8101",
    seconds=0.0,
)


class Shelf:
    """Records loads and unloads."""

    def __init__(self, turns: Turns, capacity: int) -> None:
        self.loads: list[VersionId] = []
        self.unloads: list[VersionId] = []
        self.loaded = LoadedVersions(turns, capacity=capacity, unload=self._unload)

    def loader(self, version_id: VersionId) -> Callable[[], Awaitable[CanaryReport]]:
        async def load() -> CanaryReport:
            self.loads.append(version_id)
            await asyncio.sleep(0)
            return REPORT

        return load

    async def _unload(self, version_id: VersionId) -> None:
        self.unloads.append(version_id)


async def test_a_version_is_loaded_once_for_all_who_ask_at_the_same_time() -> None:
    shelf = Shelf(Turns(2), capacity=2)

    await asyncio.gather(*(shelf.loaded.ensure(A, shelf.loader(A), Occasion.LOAD) for _ in range(5)))

    assert shelf.loads == [A]


async def test_a_publication_and_the_loads_do_not_wait_for_each_other() -> None:
    shelf, slow = Shelf(Turns(2), capacity=4), asyncio.Event()

    async def stuck() -> CanaryReport:
        await slow.wait()
        return REPORT

    load = asyncio.create_task(shelf.loaded.ensure(A, stuck, Occasion.LOAD))
    behind = asyncio.create_task(shelf.loaded.ensure(B, shelf.loader(B), Occasion.LOAD))
    await settle()
    await shelf.loaded.ensure(C, shelf.loader(C), Occasion.PUBLISH)
    assert (shelf.loads, load.done(), behind.done()) == ([C], False, False)
    slow.set()
    await asyncio.gather(load, behind)

    slow.clear()
    publication = asyncio.create_task(shelf.loaded.ensure(VersionId("ver-d"), stuck, Occasion.PUBLISH))
    next_one = asyncio.create_task(shelf.loaded.ensure(VersionId("ver-e"), shelf.loader(A), Occasion.PUBLISH))
    await settle()
    await shelf.loaded.ensure(VersionId("ver-f"), shelf.loader(B), Occasion.LOAD)
    assert (publication.done(), next_one.done()) == (False, False)  # publications have one slot
    slow.set()
    await asyncio.gather(publication, next_one)


async def test_the_least_recently_used_idle_version_is_unloaded() -> None:
    turns = Turns(3)
    shelf = Shelf(turns, capacity=2)
    async with turns.turn(A, S):
        for version_id in (A, B, C):
            await shelf.loaded.ensure(version_id, shelf.loader(version_id), Occasion.LOAD)

    assert shelf.unloads == [B]  # A is older, but in use
    assert [version_id in shelf.loaded for version_id in (A, B, C)] == [True, False, True]


async def test_where_all_others_wait_the_version_used_last_is_unloaded_and_the_capacity_kept() -> None:
    turns, d = Turns(1), VersionId("ver-d")
    shelf, visitors = Shelf(turns, capacity=3), Visitors(turns)
    visits = [await visitors.come(version_id) for version_id in (A, B, C)]  # A is in, the others wait
    for version_id in (A, B, C, d):
        await shelf.loaded.ensure(version_id, shelf.loader(version_id), Occasion.LOAD)
    assert (shelf.unloads, len(shelf.loaded)) == ([C], 3)
    await shelf.loaded.ensure(C, shelf.loader(C), Occasion.LOAD)
    assert (shelf.unloads, len(shelf.loaded)) == ([C, d], 3)  # nobody wants d: it goes first
    for task, leave in visits:
        leave.set()
        await task


async def test_what_was_loaded_before_the_engine_was_lost_is_not_trusted() -> None:
    shelf = Shelf(Turns(2), capacity=2)
    await shelf.loaded.ensure(A, shelf.loader(A), Occasion.LOAD)

    async def lost_midway() -> CanaryReport:
        shelf.loaded.forget_all()
        return REPORT

    await shelf.loaded.ensure(B, lost_midway, Occasion.LOAD)

    assert (A in shelf.loaded, B in shelf.loaded, len(shelf.loaded)) == (False, False, 0)
