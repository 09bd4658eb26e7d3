"""Submitting: retries, races, and what is refused."""

import asyncio

import pytest

from gateway.core.errors import Conflict, Invalid, NotFound, SequenceReused
from gateway.core.ids import OperationId, SessionId
from gateway.core.operations import MAX_SEQ, Operation, Status
from gateway.core.payloads import OptimStep
from gateway.core.sessions import OrderRule
from gateway.store import SqlDatabase
from tests.store.bench import Bench, HandClock, forward_backward, open_bench


async def test_a_retry_returns_the_operation_already_queued(bench: Bench) -> None:
    session = await bench.open()

    first = await bench.submit(session, forward_backward(), seq=1)
    retry = await bench.submit(session, forward_backward(), seq=1)

    assert retry == first
    assert (first.seq, first.status, first.queue_position, first.waits_for_seq) == (1, Status.QUEUED, 0, None)


async def test_a_seq_with_other_content_is_refused_for_good(bench: Bench) -> None:
    session = await bench.open()
    first = await bench.submit(session, forward_backward(first=1), seq=1)

    for _ in range(2):
        with pytest.raises(SequenceReused) as refused:
            await bench.submit(session, forward_backward(first=2), seq=1)
    assert refused.value.field == "seq"
    assert await bench.operation(first.id) == first


async def test_twenty_racing_submissions_of_one_seq_make_one_operation(bench: Bench) -> None:
    session = await bench.open()

    operations = await asyncio.gather(*(bench.submit(session, forward_backward(), seq=1) for _ in range(20)))

    assert len({operation.id for operation in operations}) == 1


async def test_racing_submissions_of_one_seq_with_two_contents_let_one_content_win(bench: Bench) -> None:
    session = await bench.open()

    outcomes = await asyncio.gather(
        *(bench.submit(session, OptimStep(learning_rate=1e-4 * (1 + index % 2)), seq=1) for index in range(20)),
        return_exceptions=True,
    )

    won = [outcome for outcome in outcomes if isinstance(outcome, Operation)]
    refused = [outcome for outcome in outcomes if isinstance(outcome, SequenceReused)]
    assert (len(won), len(refused)) == (10, 10)
    assert len({operation.id for operation in won}) == 1


async def test_racing_submissions_without_seq_are_numbered_without_gaps(bench: Bench) -> None:
    session = await bench.open()

    operations = await asyncio.gather(*(bench.submit(session) for _ in range(20)))

    assert sorted(operation.seq for operation in operations) == list(range(1, 21))


async def test_the_next_number_follows_the_highest_known(bench: Bench) -> None:
    session = await bench.open()
    await bench.submit(session, seq=7)

    assert (await bench.submit(session)).seq == 8


async def test_an_idempotency_key_returns_the_first_operation_without_a_seq(bench: Bench) -> None:
    session = await bench.open()

    operations = await asyncio.gather(*(bench.submit(session, idempotency_key="k") for _ in range(10)))

    assert {operation.seq for operation in operations} == {1}
    with pytest.raises(Conflict) as refused:
        await bench.submit(session, OptimStep(learning_rate=0.5), idempotency_key="k")
    assert refused.value.code == "idempotency_key_reused"


async def test_an_idempotency_key_is_remembered_for_a_day_and_may_then_be_used_again(bench: Bench) -> None:
    session = await bench.open()
    first = await bench.submit(session, forward_backward(), idempotency_key="k")
    bench.clock.advance(24 * 3600 - 1)
    within = await bench.submit(session, forward_backward(), idempotency_key="k")
    bench.clock.advance(2)
    after = await bench.submit(session, forward_backward(first=2), idempotency_key="k")

    assert within.id == first.id
    assert (after.seq, after.id != first.id) == (2, True)


async def test_projects_that_use_one_idempotency_key_do_not_meet(bench: Bench, database: SqlDatabase) -> None:
    stranger = await open_bench(database, bench.clock, "stranger")
    mine, theirs = await bench.open(), await stranger.open()

    first = await bench.submit(mine, forward_backward(), idempotency_key="k")
    other = await stranger.submit(theirs, forward_backward(first=2), idempotency_key="k")

    assert (other.session_id, other.id != first.id) == (theirs.id, True)
    assert (await bench.submit(mine, forward_backward(), idempotency_key="k")).id == first.id
    assert (await stranger.submit(theirs, forward_backward(first=2), idempotency_key="k")).id == other.id


async def test_one_idempotency_key_raced_in_two_sessions_is_used_once(bench: Bench) -> None:
    sessions = [await bench.open() for _ in range(2)]

    outcomes = await asyncio.gather(
        *(bench.submit(sessions[index % 2], idempotency_key="k") for index in range(10)), return_exceptions=True
    )

    won = {outcome.id for outcome in outcomes if isinstance(outcome, Operation)}
    assert len(won) == 1
    assert {type(outcome) for outcome in outcomes} == {Operation, Conflict}


async def test_a_retry_after_a_stop_is_answered_and_new_work_is_refused(bench: Bench) -> None:
    session = await bench.open()
    first = await bench.submit(session, seq=1)
    async with bench.database.write() as unit:
        await unit.sessions.stop(session.project_id, session.id, bench.clock.now())

    assert (await bench.submit(session, seq=1)).id == first.id
    with pytest.raises(Conflict) as refused:
        await bench.submit(session, seq=2)
    assert refused.value.code == "session_not_running"


async def test_a_seq_that_was_passed_is_refused(bench: Bench) -> None:
    session = await bench.open(order=OrderRule.ASCENDING)
    await bench.submit(session, seq=5)
    await bench.run_one()

    with pytest.raises(Conflict) as refused:
        await bench.submit(session, seq=3)
    assert (refused.value.code, refused.value.field) == ("sequence_passed", "seq")


@pytest.mark.parametrize("seq", [0, -1, MAX_SEQ + 1])
async def test_a_seq_out_of_range_is_refused(bench: Bench, seq: int) -> None:
    session = await bench.open()

    with pytest.raises(Invalid) as refused:
        await bench.submit(session, seq=seq)
    assert refused.value.field == "seq"


async def test_a_session_that_used_the_highest_seq_has_no_next(bench: Bench) -> None:
    session = await bench.open(order=OrderRule.ASCENDING)
    await bench.submit(session, seq=MAX_SEQ)

    with pytest.raises(Invalid):
        await bench.submit(session)


async def test_a_strangers_session_and_operation_are_missing(
    database: SqlDatabase, bench: Bench, clock: HandClock
) -> None:
    stranger = await open_bench(database, clock, "other")
    session = await bench.open()
    operation = await bench.submit(session)

    async with database.read() as unit:
        with pytest.raises(NotFound) as theirs:
            await unit.sessions.get(stranger.project_id, session.id)
        with pytest.raises(NotFound) as nobodys:
            await unit.sessions.get(bench.project_id, SessionId(f"{session.id}0"))
        with pytest.raises(NotFound) as their_operation:
            await unit.operations.get(stranger.project_id, operation.id)
        assert await unit.operations.page(stranger.project_id, session.id, limit=10, after_seq=0) == []
        assert await unit.sessions.page(stranger.project_id, limit=10, after=None) == []
    assert theirs.value.message.replace(session.id, "X") == nobodys.value.message.replace(f"{session.id}0", "X")
    assert theirs.value.code == nobodys.value.code
    assert their_operation.value.message == f"no operation {operation.id!r}"


@pytest.mark.parametrize("id", ["", "a\x00b", "\ud800", "x" * 10_000, "' OR 1=1 --"])
async def test_text_that_is_no_id_names_nothing(bench: Bench, id: str) -> None:
    async with bench.database.read() as unit:
        with pytest.raises(NotFound):
            await unit.sessions.get(bench.project_id, SessionId(id))
        with pytest.raises(NotFound):
            await unit.operations.get(bench.project_id, OperationId(id))
        assert await unit.sessions.by_name(bench.project_id, id) is None
        assert await unit.operations.by_idempotency_key(bench.project_id, id) is None


async def test_operations_are_listed_by_seq_with_what_they_wait_for(bench: Bench) -> None:
    session = await bench.open()
    for seq in (4, 1, 2, 6):
        await bench.submit(session, seq=seq)

    async with bench.database.read() as unit:
        page = await unit.operations.page(session.project_id, session.id, limit=3, after_seq=1)

    assert [(o.seq, o.queue_position, o.waits_for_seq) for o in page] == [(2, 1, None), (4, 2, 3), (6, 3, 3)]
