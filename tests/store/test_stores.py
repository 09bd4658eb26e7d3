"""Blobs, keys, samples, usage and locks."""

import asyncio
import hashlib
import mmap
from datetime import timedelta
from pathlib import Path

import pytest

from gateway.core.codec import encode_payload
from gateway.core.errors import NotFound
from gateway.core.ids import KeyId, new_key_id, new_sample_id
from gateway.core.payloads import ForwardBackward
from gateway.core.ports import StoredSample
from gateway.core.principals import ALL_SCOPES, Key, Scope
from gateway.core.records import CorruptRecord
from gateway.core.submission import submit
from gateway.core.usage import Meter, UsageFact
from gateway.store import SqlDatabase
from gateway.store.blobs import LARGEST_ROW_BYTES
from tests.store.bench import Bench, HandClock, forward_backward, open_bench

SIZES = [0, 1, LARGEST_ROW_BYTES, LARGEST_ROW_BYTES + 1, 3_000_000]


def blob_files(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()]


@pytest.mark.parametrize("size", SIZES)
async def test_a_blob_comes_back_under_its_digest(bench: Bench, tmp_path: Path, size: int) -> None:
    content = bytes(index % 251 for index in range(size))
    async with bench.database.write() as unit:
        digest = await unit.blobs.put(bench.project_id, content)
        assert await unit.blobs.get(bench.project_id, digest) == content
    async with bench.database.write() as unit:
        assert await unit.blobs.put(bench.project_id, content) == digest

    async with bench.database.read() as unit:
        assert await unit.blobs.get(bench.project_id, digest) == content
    assert digest == hashlib.sha256(content).hexdigest()
    assert len(blob_files(tmp_path)) == (1 if size > LARGEST_ROW_BYTES else 0)


@pytest.mark.parametrize("size", [10, LARGEST_ROW_BYTES + 1])
async def test_a_blob_of_another_project_is_missing(
    database: SqlDatabase, bench: Bench, clock: HandClock, size: int
) -> None:
    stranger = await open_bench(database, clock, "other")
    async with database.write() as unit:
        digest = await unit.blobs.put(bench.project_id, b"x" * size)

    async with database.read() as unit:
        with pytest.raises(NotFound) as theirs:
            await unit.blobs.get(stranger.project_id, digest)
        with pytest.raises(NotFound) as nobodys:
            await unit.blobs.get(bench.project_id, "0" * 64)
    assert theirs.value.message.replace(digest, "0" * 64) == nobodys.value.message


async def test_a_blob_that_was_rolled_back_is_missing(bench: Bench) -> None:
    async def put_and_break() -> None:
        async with bench.database.write() as unit:
            await unit.blobs.put(bench.project_id, b"gone")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await put_and_break()
    async with bench.database.read() as unit:
        with pytest.raises(NotFound):
            await unit.blobs.get(bench.project_id, hashlib.sha256(b"gone").hexdigest())


async def test_a_blob_file_that_was_changed_or_lost_is_found_out(bench: Bench, tmp_path: Path) -> None:
    content = bytes(LARGEST_ROW_BYTES + 1)
    async with bench.database.write() as unit:
        digest = await unit.blobs.put(bench.project_id, content)
    (path,) = blob_files(tmp_path)

    path.write_bytes(content[:-1] + b"\x01")
    async with bench.database.read() as unit:
        with pytest.raises(CorruptRecord, match="changed"):
            await unit.blobs.get(bench.project_id, digest)
    path.unlink()
    async with bench.database.read() as unit:
        with pytest.raises(CorruptRecord, match="gone"):
            await unit.blobs.get(bench.project_id, digest)


async def test_one_large_blob_raced_by_many_is_stored_once(bench: Bench, tmp_path: Path) -> None:
    content = bytes(LARGEST_ROW_BYTES + 7)

    async def put() -> str:
        async with bench.database.write() as unit:
            return await unit.blobs.put(bench.project_id, content)

    assert len(set(await asyncio.gather(*(put() for _ in range(8))))) == 1
    assert len(blob_files(tmp_path)) == 1


async def test_a_large_payload_is_a_view_of_its_file_and_outlives_it(bench: Bench, tmp_path: Path) -> None:
    """Its tensors are mapped, so that a body of any size is in memory a few pages at a time."""
    payload = forward_backward(tokens=40_000)
    body = await bench.database.prepare(bench.project_id, payload)
    (path,) = blob_files(tmp_path)
    async with bench.database.write() as unit:
        await unit.blobs.add(bench.project_id, body)

    async with bench.database.read() as unit:
        found = await unit.blobs.get_payload(bench.project_id, body.digest)

    assert isinstance(found, ForwardBackward)
    for datum in found.data:
        for tensor in (datum.model_input, *datum.loss_fn_inputs.values()):
            assert isinstance(tensor.data, memoryview)
            assert isinstance(tensor.data.obj, mmap.mmap)
            assert tensor.data.readonly
    path.unlink()
    assert found == payload
    assert encode_payload(found) == encode_payload(payload)


async def test_a_payload_comes_back_equal(bench: Bench) -> None:
    payload = forward_backward(tokens=100)
    body = await bench.database.prepare(bench.project_id, payload)
    async with bench.database.write() as unit:
        await unit.blobs.add(bench.project_id, body)
        assert await unit.blobs.get_payload(bench.project_id, body.digest) == payload


async def test_a_large_body_whose_file_was_collected_meanwhile_is_written_again(bench: Bench, tmp_path: Path) -> None:
    session, payload = await bench.open(), forward_backward(tokens=40_000)
    body = await bench.database.prepare(bench.project_id, payload)
    (path,) = blob_files(tmp_path)
    path.unlink()
    await bench.database.apply(
        lambda unit: submit(unit, project_id=bench.project_id, key_id=bench.key_id, session_id=session.id, body=body)
    )
    assert (await bench.claimed()).payload == payload


def new_key(bench: Bench, **changes: object) -> Key:
    fields: dict[str, object] = {
        "id": new_key_id(),
        "project_id": bench.project_id,
        "name": "laptop",
        "scopes": ALL_SCOPES,
        "created_at": bench.clock.now(),
        "expires_at": None,
        "revoked_at": None,
    }
    return Key(**{**fields, **changes})  # pyright: ignore[reportArgumentType]


async def test_keys_come_back_as_added_and_in_order(bench: Bench) -> None:
    first = new_key(bench)
    second = new_key(
        bench,
        scopes=frozenset({Scope.INFERENCE}),
        created_at=bench.clock.advance(1),
        expires_at=bench.clock.now() + timedelta(days=1),
    )
    async with bench.database.write() as unit:
        for key in (second, first):
            await unit.keys.add(key)

    async with bench.database.read() as unit:
        assert await unit.keys.all() == [first, second]
        assert await unit.keys.get(second.id) == second
        assert await unit.keys.get(KeyId("nope")) is None
        assert await unit.keys.get(KeyId("\x00")) is None


async def test_revoking_twice_keeps_the_first_time(bench: Bench) -> None:
    key = new_key(bench)
    async with bench.database.write() as unit:
        await unit.keys.add(key)
        first = await unit.keys.revoke(key.id, bench.clock.now())
        again = await unit.keys.revoke(key.id, bench.clock.advance(5))
        with pytest.raises(NotFound):
            await unit.keys.revoke(KeyId("nope"), bench.clock.now())

    assert first.revoked_at is not None
    assert again == first


async def test_a_project_is_made_once_however_many_ask(database: SqlDatabase) -> None:
    async def ensure() -> str:
        async with database.write() as unit:
            return await unit.keys.ensure_project("shared")

    assert len(set(await asyncio.gather(*(ensure() for _ in range(12))))) == 1


def sample(content: bytes) -> StoredSample:
    return StoredSample(id=new_sample_id(), key="k", request_digest="d", content=content)


@pytest.mark.parametrize("size", [20, LARGEST_ROW_BYTES + 1])
async def test_the_first_answer_to_a_key_stays(bench: Bench, size: int) -> None:
    first = sample(b"1" * size)
    async with bench.database.write() as unit:
        assert await unit.samples.add(bench.project_id, first)
        assert not await unit.samples.add(bench.project_id, sample(b"second"))

    async with bench.database.read() as unit:
        assert await unit.samples.by_idempotency_key(bench.project_id, "k") == first
        assert await unit.samples.by_idempotency_key(bench.project_id, "other") is None


async def test_an_answer_is_kept_a_day_and_then_makes_room(bench: Bench) -> None:
    async with bench.database.write() as unit:
        await unit.samples.add(bench.project_id, sample(b"old"))
    bench.clock.advance(24 * 3600 - 1)
    async with bench.database.read() as unit:
        assert await unit.samples.by_idempotency_key(bench.project_id, "k") is not None
    bench.clock.advance(1)
    fresh = sample(b"new")
    async with bench.database.write() as unit:
        assert await unit.samples.by_idempotency_key(bench.project_id, "k") is None
        await unit.samples.add(bench.project_id, fresh)

    async with bench.database.read() as unit:
        assert await unit.samples.by_idempotency_key(bench.project_id, "k") == fresh


async def test_an_answer_belongs_to_its_project(database: SqlDatabase, bench: Bench, clock: HandClock) -> None:
    stranger = await open_bench(database, clock, "other")
    async with database.write() as unit:
        await unit.samples.add(bench.project_id, sample(b"mine"))

    async with database.read() as unit:
        assert await unit.samples.by_idempotency_key(stranger.project_id, "k") is None


async def add_facts(bench: Bench, *facts: UsageFact) -> None:
    async with bench.database.write() as unit:
        await unit.usage.add(facts)


async def test_a_fact_counts_once_whatever_is_retried(bench: Bench) -> None:
    fact = bench.fact("op-1", 7)

    await asyncio.gather(*(add_facts(bench, fact, bench.fact("op-1", 2, Meter.PREFILL)) for _ in range(8)))
    await add_facts(bench, bench.fact("op-1", 99))

    async with bench.database.read() as unit:
        facts = await unit.usage.of_source("op-1")
    assert facts == [bench.fact("op-1", 2, Meter.PREFILL), fact]


async def test_no_facts_are_no_statement(bench: Bench) -> None:
    await add_facts(bench)

    async with bench.database.read() as unit:
        assert await unit.usage.of_source("op-1") == []


async def test_one_of_many_holds_a_lock_until_it_runs_out(bench: Bench) -> None:
    async def hold(owner: str) -> bool:
        async with bench.database.write() as unit:
            return await unit.locks.hold("publisher", owner=owner, lease_s=10, at=bench.clock.now())

    got = await asyncio.gather(*(hold(f"gateway-{index}") for index in range(8)))
    holder = f"gateway-{got.index(True)}"
    other = "gateway-9"

    assert got.count(True) == 1
    bench.clock.advance(9)
    assert (await hold(other), await hold(holder)) == (False, True)
    bench.clock.advance(9.999)
    assert await hold(other) is False
    bench.clock.advance(0.001)
    assert (await hold(other), await hold(holder)) == (True, False)
