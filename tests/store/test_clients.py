"""Clients and their seats, refused turns, and samples that run in the background."""

from dataclasses import replace
from datetime import timedelta

import pytest

from gateway.core.clients import Client, Finish, Sampler, Seat, StoredLoss, parse_sampler_address, parse_session_address
from gateway.core.errors import NotFound
from gateway.core.ids import ClientId, new_client_id, new_sample_id
from gateway.core.operations import Status
from gateway.core.payloads import OperationKind
from gateway.core.ports import RunningSample, StoredSample
from gateway.core.sessions import Session
from tests.store.bench import BASE, Bench, forward_backward


async def client_of(bench: Bench) -> Client:
    now = bench.clock.now()
    client = Client(
        id=new_client_id(),
        project_id=bench.project_id,
        key_id=bench.key_id,
        name="run 7",
        tags=["a"],
        user_metadata={"who": "me"},
        created_at=now,
        seen_at=now,
        finished_at=None,
        finish=None,
        detail=None,
    )
    async with bench.database.write() as unit:
        await unit.clients.add(client)
    return client


async def state_of(bench: Bench, session: Session) -> Session:
    async with bench.database.read() as unit:
        return await unit.sessions.get(bench.project_id, session.id)


def test_an_address_names_one_seat_and_nothing_else() -> None:
    seat = Seat(client_id=new_client_id(), number=12)
    assert parse_session_address(seat.session_address) == seat
    assert parse_sampler_address(seat.sampler_address) == seat
    assert parse_session_address(seat.sampler_address) is None
    for text in ("", "sess-x", f"{seat.client_id}:train:", f"{seat.client_id}:train:01", f"x{seat.session_address}"):
        assert parse_session_address(text) is None


async def test_a_sign_of_life_keeps_a_clients_sessions_alive(bench: Bench) -> None:
    client = await client_of(bench)
    now = bench.clock.now()
    session = await bench.open(
        seat=Seat(client_id=client.id, number=0), ttl_s=60, expires_at=now + timedelta(seconds=60)
    )
    bench.clock.time += timedelta(seconds=59)
    async with bench.database.write() as unit:
        await unit.clients.seen(bench.project_id, client.id, bench.clock.now())
    bench.clock.time += timedelta(seconds=59)
    async with bench.database.write() as unit:
        assert await unit.sessions.expire_due(bench.clock.now()) == []
    bench.clock.time += timedelta(seconds=2)
    async with bench.database.write() as unit:
        assert await unit.sessions.expire_due(bench.clock.now()) == [session.id]


async def test_a_client_ends_once_and_names_its_live_sessions(bench: Bench) -> None:
    client = await client_of(bench)
    session = await bench.open(seat=Seat(client_id=client.id, number=0))
    async with bench.database.write() as unit:
        ended = await unit.clients.finish(bench.project_id, client.id, Finish.ERRORED, "boom", bench.clock.now())
        await unit.clients.finish(bench.project_id, client.id, Finish.SUCCESS, None, bench.clock.now())
    async with bench.database.read() as unit:
        recorded = await unit.clients.get(bench.project_id, client.id)
        found = await unit.sessions.by_seat(bench.project_id, Seat(client_id=client.id, number=0))
    assert ended == [session.id]
    assert (recorded.finish, recorded.detail) == (Finish.ERRORED, "boom")
    assert found is not None
    assert found[0].id == session.id
    assert found[0].address == f"{client.id}:train:0"


async def test_a_seat_keeps_its_first_sampler_and_counts_who_joins(bench: Bench) -> None:
    client = await client_of(bench)
    seat = Seat(client_id=client.id, number=3)
    sampler = Sampler(
        seat=seat,
        project_id=bench.project_id,
        base_model=BASE,
        version_id=None,
        operation_id=None,
        session_id=None,
        copies=0,
        created_at=bench.clock.now(),
    )
    async with bench.database.write() as unit:
        assert await unit.clients.add_sampler(sampler) == sampler
        assert await unit.clients.add_sampler(replace(sampler, base_model="other")) == sampler
        assert [await unit.clients.join_sampler(bench.project_id, seat) for _ in range(2)] == [1, 2]
        with pytest.raises(NotFound):
            await unit.clients.join_sampler(bench.project_id, Seat(client_id=ClientId(f"{client.id}"), number=4))


async def test_a_seat_keeps_its_first_loss_within_its_project(bench: Bench) -> None:
    client = await client_of(bench)
    async with bench.database.write() as unit:
        digest = await unit.blobs.put(bench.project_id, b"{}")
        loss = StoredLoss(
            seat=Seat(client_id=client.id, number=0),
            project_id=bench.project_id,
            document_digest=digest,
            created_at=bench.clock.now(),
        )
        assert await unit.clients.add_loss(loss) == loss
        assert await unit.clients.add_loss(replace(loss, document_digest="0" * 64)) == loss
        stranger = await unit.keys.ensure_project("stranger")
        for project_id, seat in ((stranger, loss.seat), (bench.project_id, replace(loss.seat, number=1))):
            with pytest.raises(NotFound) as missing:
                await unit.clients.loss(project_id, seat)
            assert missing.value.code == "custom_loss_not_found"


async def test_refused_turns_are_passed_in_order_and_block_nobody(bench: Bench) -> None:
    session = await bench.open()
    async with bench.database.write() as unit:
        await unit.operations.refuse(session, bench.key_id, 2, OperationKind.OPTIM_STEP)
        await unit.operations.refuse(session, bench.key_id, 3, OperationKind.FORWARD_BACKWARD)
    fourth = await bench.submit(session, forward_backward(), seq=4)
    assert fourth.waits_for_seq == 1
    assert (await state_of(bench, session)).applied_seq == 0

    await bench.submit(session, forward_backward(), seq=1)
    assert (await bench.run_one()).seq == 1
    passed = await state_of(bench, session)
    # The refused forward_backward leaves a hole in the gradient, once its turn has come.
    assert (passed.applied_seq, passed.window_broken_by) == (3, 3)
    assert (await bench.run_one()).seq == 4


async def test_a_turn_that_is_next_is_passed_at_once_and_a_taken_one_stays(bench: Bench) -> None:
    session = await bench.open()
    second = await bench.submit(session, forward_backward(), seq=2)
    async with bench.database.write() as unit:
        await unit.operations.refuse(session, bench.key_id, 1, OperationKind.SAVE_WEIGHTS)
        await unit.operations.refuse(session, bench.key_id, 2, OperationKind.SAVE_WEIGHTS)
    assert (await state_of(bench, session)).applied_seq == 1
    async with bench.database.read() as unit:
        first = await unit.operations.by_seq(session.id, 1)
        kept = await unit.operations.by_seq(session.id, 2)
    assert first is not None
    assert first.status is Status.CANCELLED
    assert kept is not None
    assert (kept.id, kept.status) == (second.id, Status.QUEUED)


async def test_a_sample_runs_once_and_is_answered_once(bench: Bench) -> None:
    sample = RunningSample(id=new_sample_id(), key="k", request_digest="d" * 64, owner="gateway-a")
    async with bench.database.write() as unit:
        assert await unit.samples.begin(bench.project_id, sample, lease_s=10) == sample
        again = replace(sample, id=new_sample_id())
        assert (await unit.samples.begin(bench.project_id, again, lease_s=10)).id == sample.id
    bench.clock.time += timedelta(seconds=9)
    async with bench.database.write() as unit:
        await unit.samples.renew([sample.id], owner="gateway-a", lease_s=10)
    bench.clock.time += timedelta(seconds=9)
    async with bench.database.write() as unit:
        assert await unit.samples.lose(expired_by=bench.clock.now()) == []
    async with bench.database.read() as unit:
        assert await unit.samples.final_among([sample.id]) == []
        assert (await unit.samples.get(bench.project_id, sample.id)).final is False
    async with bench.database.write() as unit:
        for content in (b"tokens", b"others"):
            assert await unit.samples.end(bench.project_id, sample.id, content, owner="gateway-a")
    async with bench.database.read() as unit:
        stored = await unit.samples.get(bench.project_id, sample.id)
        assert await unit.samples.final_among([sample.id]) == [sample.id]
    assert isinstance(stored, StoredSample)
    assert stored.content == b"tokens"


async def test_a_sample_that_was_answered_since_its_key_was_looked_up_does_not_run_again(bench: Bench) -> None:
    sample = RunningSample(id=new_sample_id(), key="k", request_digest="d" * 64, owner="gateway-a")
    repeated = replace(sample, id=new_sample_id(), owner="gateway-b")
    async with bench.database.write() as unit:
        await unit.samples.begin(bench.project_id, sample, lease_s=10)
    async with bench.database.write() as unit:
        assert await unit.samples.by_idempotency_key(bench.project_id, "k") is None
        assert await unit.samples.end(bench.project_id, sample.id, b"tokens", owner="gateway-a")

        known = await unit.samples.begin(bench.project_id, repeated, lease_s=10)

        assert isinstance(known, StoredSample)
        assert (known.id, known.content) == (sample.id, b"tokens")
        with pytest.raises(NotFound):
            await unit.samples.get(bench.project_id, repeated.id)


async def test_a_sample_that_its_gateway_no_longer_renews_is_lost_for_good_once_that_is_declared(bench: Bench) -> None:
    lost, kept = (
        RunningSample(id=new_sample_id(), key=key, request_digest="d" * 64, owner="gateway-a") for key in "lk"
    )
    async with bench.database.write() as unit:
        for sample in (lost, kept):
            await unit.samples.begin(bench.project_id, sample, lease_s=10)
    bench.clock.time += timedelta(seconds=11)
    async with bench.database.write() as unit:
        assert await unit.samples.final_among([lost.id, kept.id]) == []
        await unit.samples.renew([kept.id], owner="gateway-a", lease_s=10)
        assert await unit.samples.lose(expired_by=bench.clock.now()) == [lost.id]
        assert await unit.samples.lose(expired_by=bench.clock.now()) == []
        await unit.samples.renew([lost.id], owner="gateway-a", lease_s=10)
        assert not await unit.samples.end(bench.project_id, lost.id, b"late", owner="gateway-a")
        assert await unit.samples.final_among([lost.id, kept.id]) == [lost.id]
        found = [await unit.samples.get(bench.project_id, sample.id) for sample in (lost, kept)]
        assert [one.final for one in found] == [True, False]
        await unit.samples.forget_lost(older_than=bench.clock.now())
    async with bench.database.read() as unit:
        with pytest.raises(NotFound):
            await unit.samples.get(bench.project_id, lost.id)
