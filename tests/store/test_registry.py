"""The registry: aliases with their history, labels, expiry, deletion with its guards, and the gate's verdicts."""

from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import text

from gateway.core.clients import LIVES, Finish, Sampler, Seat
from gateway.core.errors import Conflict, Invalid, NotFound
from gateway.core.ids import VersionId
from gateway.core.operations import Status
from gateway.core.payloads import LoadState, SaveState, SaveWeights
from gateway.core.results import LoadStateResult, SaveResult
from gateway.core.sessions import Session, Snapshot
from gateway.core.versions import Check, Event, Labels, Occasion, Version, VersionFilter, VersionKind, VersionState
from gateway.store.columns import micros
from tests.store.bench import REPORT, Bench, HandClock, new_version, open_bench
from tests.store.test_clients import client_of

WINDOW = timedelta(hours=1)


async def version(bench: Bench, version_id: VersionId) -> Version:
    async with bench.database.read() as unit:
        return await unit.versions.get(bench.project_id, version_id)


async def saved_state(bench: Bench, session: Session, labels: Labels | None = None) -> SaveResult:
    await bench.submit(session, SaveState(group="policy", labels=labels or Labels()))
    work = await bench.claimed()
    staged = new_version(work.operation.seq, kind=VersionKind.STATE, labels=labels)
    return await bench.stage(work, complete=True, version=staged)


async def set_alias(bench: Bench, version_id: VersionId, alias: str = "champion") -> None:
    async with bench.database.write() as unit:
        await unit.registry.set_alias(bench.project_id, version_id, alias, by=bench.key_id, at=bench.clock.now())


async def delete(bench: Bench, version_id: VersionId, *, force: bool = False) -> Version:
    async with bench.database.write() as unit:
        return await unit.registry.delete(
            bench.project_id, version_id, force=force, by=bench.key_id, at=bench.clock.now()
        )


async def undelete(bench: Bench, version_id: VersionId) -> Version:
    async with bench.database.write() as unit:
        return await unit.registry.undelete(
            bench.project_id, version_id, window=WINDOW, by=bench.key_id, at=bench.clock.now()
        )


async def stop(bench: Bench, session: Session) -> None:
    async with bench.database.write() as unit:
        await unit.sessions.stop(bench.project_id, session.id, bench.clock.now())


async def test_an_alias_moves_and_its_history_says_who_moved_it_from_where(bench: Bench) -> None:
    session = await bench.open()
    first, second = await saved_state(bench, session), await saved_state(bench, session)
    for saved in (first, second, second):
        bench.clock.advance(1)
        await set_alias(bench, saved.version_id)

    async with bench.database.read() as unit:
        named = await unit.versions.by_alias(bench.project_id, "policy", "champion")
        history = await unit.registry.history(bench.project_id, "policy", limit=10)
        aliases = await unit.registry.aliases_of([first.version_id, second.version_id])
    assert named.id == second.version_id
    assert aliases == {second.version_id: ["champion"]}
    assert [(line.event, line.number, line.alias, line.previous, line.key_id) for line in history] == [
        (Event.ALIASED, 2, "champion", 1, bench.key_id),
        (Event.ALIASED, 1, "champion", None, bench.key_id),
    ]


async def test_a_history_is_read_page_by_page(bench: Bench) -> None:
    """Several events at one moment, so that the page must end between them."""
    session = await bench.open()
    first, second = await saved_state(bench, session), await saved_state(bench, session)
    for saved in (first, second, first, second, first):
        await set_alias(bench, saved.version_id)

    async with bench.database.read() as unit:
        whole = [event.id for event in await unit.registry.history(bench.project_id, "policy", limit=9)]
        pages: list[str] = []
        while len(pages) < len(whole):
            after = pages[-1] if pages else None
            page = await unit.registry.history(bench.project_id, "policy", limit=2, after=after)
            pages += [event.id for event in page]
        assert await unit.registry.history(bench.project_id, "policy", limit=2, after=whole[-1]) == []
        for nobodys in ("evt-no", "\0"):
            with pytest.raises(NotFound, match="no such event"):
                await unit.registry.history(bench.project_id, "policy", limit=2, after=nobodys)
    assert len(whole) == 5
    assert pages == whole


async def test_an_alias_that_was_taken_away_names_nothing(bench: Bench) -> None:
    saved = await saved_state(bench, await bench.open())
    await set_alias(bench, saved.version_id)

    async with bench.database.write() as unit:
        await unit.registry.drop_alias(
            bench.project_id, "policy", "champion", by=bench.key_id, at=bench.clock.advance(1)
        )

    async with bench.database.write() as unit:
        with pytest.raises(NotFound):
            await unit.versions.by_alias(bench.project_id, "policy", "champion")
        with pytest.raises(NotFound):
            await unit.registry.drop_alias(
                bench.project_id, "policy", "champion", by=bench.key_id, at=bench.clock.now()
            )
        history = await unit.registry.history(bench.project_id, "policy", limit=1)
    assert [(line.event, line.previous) for line in history] == [(Event.UNALIASED, 1)]


async def test_latest_is_the_newest_version_that_can_be_used(bench: Bench) -> None:
    session = await bench.open()
    state = await saved_state(bench, session)
    published, staged = await bench.save(session), await bench.save(session)
    async with bench.database.write() as unit:
        await unit.versions.publish(published.version_id, REPORT, at=bench.clock.now())

    async def newest(kind: VersionKind | None) -> VersionId:
        async with bench.database.read() as unit:
            return (await unit.versions.newest(bench.project_id, "policy", kind)).id

    assert await newest(VersionKind.ADAPTER) == published.version_id != staged.version_id
    assert await newest(VersionKind.STATE) == state.version_id
    assert await newest(None) == published.version_id
    await delete(bench, published.version_id, force=True)
    assert await newest(None) == state.version_id
    with pytest.raises(NotFound):
        await newest(VersionKind.ADAPTER)


async def test_labels_are_kept_filtered_by_and_edited(bench: Bench) -> None:
    session = await bench.open()
    labels = Labels(name="ck-1", description="half way", user_metadata={"run": "a"}, tags=("eval", "v1:x"), ttl_s=60)
    saved = await saved_state(bench, session, labels)
    await saved_state(bench, session)
    now = bench.clock.now()

    kept = await version(bench, saved.version_id)
    async with bench.database.read() as unit:
        tagged = await unit.versions.page(bench.project_id, VersionFilter(tag="eval"), limit=9, after=None)
        part = await unit.versions.page(bench.project_id, VersionFilter(tag="eva"), limit=9, after=None)
        wild = await unit.versions.page(bench.project_id, VersionFilter(tag="%"), limit=9, after=None)
        states = await unit.versions.page(
            bench.project_id, VersionFilter(kind=VersionKind.STATE, state=VersionState.STAGED), limit=9, after=None
        )
    assert (kept.labels, kept.expires_at) == (labels, now + timedelta(seconds=60))
    assert ([one.id for one in tagged], part, wild) == ([saved.version_id], [], [])
    assert len(states) == 2

    bench.clock.advance(30)
    edit = replace(labels, name="other", tags=(), description="done", ttl_s=120)
    async with bench.database.write() as unit:
        edited = await unit.registry.edit(
            bench.project_id, saved.version_id, edit, by=bench.key_id, at=bench.clock.now()
        )
    assert edited.labels == replace(edit, name="ck-1")
    assert edited.expires_at == bench.clock.now() + timedelta(seconds=120)


async def test_a_session_uses_a_name_once_per_kind(bench: Bench) -> None:
    session = await bench.open()
    labels = Labels(name="final")
    await saved_state(bench, session, labels)

    with pytest.raises(Conflict) as refused:
        await bench.submit(session, SaveState(group="elsewhere", labels=labels))
    assert refused.value.code == "version_name_taken"
    await bench.submit(session, SaveWeights(group="policy", labels=labels))
    await bench.stage(await bench.claimed(), complete=True, version=new_version(2, labels=labels))
    await saved_state(bench, await bench.open(), labels)

    async with bench.database.read() as unit:
        found = await unit.versions.by_name(session.id, VersionKind.STATE, "final")
        assert found is not None
        assert found.number == 1


async def test_two_queued_saves_of_one_name_cannot_both_be_registered(bench: Bench) -> None:
    session, labels = await bench.open(), Labels(name="twice")
    for _ in range(2):
        await bench.submit(session, SaveState(group="policy", labels=labels))
    first = await bench.claimed()
    await bench.stage(first, complete=True, version=new_version(1, kind=VersionKind.STATE, labels=labels))
    second = await bench.claimed()

    with pytest.raises(Conflict) as refused:
        await bench.stage(second, complete=True, version=new_version(2, kind=VersionKind.STATE, labels=labels))
    assert refused.value.code == "version_name_taken"
    assert (await bench.operation(second.operation.id)).status is Status.RUNNING


async def test_a_deleted_version_can_be_brought_back_while_the_window_is_open(bench: Bench) -> None:
    session = await bench.open()
    saved = await saved_state(bench, session)

    gone = await delete(bench, saved.version_id)
    again = await delete(bench, saved.version_id)
    assert gone.deleted_at == again.deleted_at == bench.clock.now()
    with pytest.raises(NotFound) as refused:
        gone.require_present(bench.clock.now())
    assert refused.value.code == "version_deleted"
    with pytest.raises(NotFound):
        await bench.submit(session, LoadState(version_id=saved.version_id, optimizer=True))

    bench.clock.advance(WINDOW.total_seconds() - 1)
    back = await undelete(bench, saved.version_id)
    assert back.deleted_at is None
    back.require_present(bench.clock.now())

    await delete(bench, saved.version_id)
    bench.clock.advance(WINDOW.total_seconds())
    with pytest.raises(Conflict) as late:
        await undelete(bench, saved.version_id)
    assert late.value.code == "undelete_window_over"


async def test_an_expired_version_is_refused_at_once_recorded_later_and_brought_back_for_good(bench: Bench) -> None:
    saved = await saved_state(bench, await bench.open(), Labels(ttl_s=10))
    expiring = await version(bench, saved.version_id)
    expiring.require_present(bench.clock.now())
    bench.clock.advance(10)

    with pytest.raises(NotFound) as refused:
        expiring.require_present(bench.clock.now())
    assert refused.value.code == "version_expired"
    bench.clock.advance(5)
    async with bench.database.write() as unit:
        assert await unit.upkeep.expire_due(bench.clock.now()) == [saved.version_id]
        assert await unit.upkeep.expire_due(bench.clock.now()) == []
    expired = await version(bench, saved.version_id)
    assert expired.deleted_at == expired.expires_at
    with pytest.raises(NotFound) as still:
        expired.require_present()
    assert still.value.code == "version_expired"

    back = await undelete(bench, saved.version_id)
    assert (back.deleted_at, back.expires_at, back.labels.ttl_s) == (None, None, None)


async def refusal(bench: Bench, version_id: VersionId, *, force: bool = False) -> str:
    with pytest.raises(Conflict) as refused:
        await delete(bench, version_id, force=force)
    assert (await version(bench, version_id)).deleted_at is None
    return refused.value.code


async def test_a_version_with_an_alias_is_not_deleted_even_by_force(bench: Bench) -> None:
    saved = await saved_state(bench, await bench.open())
    await set_alias(bench, saved.version_id)

    assert await refusal(bench, saved.version_id) == "version_aliased"
    assert await refusal(bench, saved.version_id, force=True) == "version_aliased"


async def test_what_a_live_session_answers_with_is_deleted_only_by_force(bench: Bench) -> None:
    session = await bench.open()
    saved = await bench.save(session)
    assert await refusal(bench, saved.version_id, force=True) == "version_in_use"  # the gate works with it
    async with bench.database.write() as unit:
        await unit.versions.publish(saved.version_id, REPORT, at=bench.clock.now())

    assert await refusal(bench, saved.version_id) == "version_in_use"
    assert (await delete(bench, saved.version_id, force=True)).deleted_at is not None


@pytest.mark.parametrize("made_by_a_save", [False, True])
async def test_what_a_living_programs_sampler_stays_with_is_deleted_only_by_force(
    bench: Bench, made_by_a_save: bool
) -> None:
    session = await bench.open()
    saved = await saved_state(bench, session)
    await saved_state(bench, session)
    client = await client_of(bench)
    sampler = Sampler(
        seat=Seat(client_id=client.id, number=0),
        project_id=bench.project_id,
        base_model=session.base_model,
        version_id=None if made_by_a_save else saved.version_id,
        operation_id=(await version(bench, saved.version_id)).operation_id if made_by_a_save else None,
        session_id=None,
        copies=0,
        created_at=bench.clock.now(),
    )
    async with bench.database.write() as unit:
        await unit.clients.add_sampler(sampler)

    assert await refusal(bench, saved.version_id) == "version_in_use"
    bench.clock.advance(LIVES.total_seconds() - 1)
    assert await refusal(bench, saved.version_id) == "version_in_use"
    bench.clock.advance(1)
    assert (await delete(bench, saved.version_id)).deleted_at is not None  # nothing was heard of the program since
    await undelete(bench, saved.version_id)
    async with bench.database.write() as unit:
        await unit.clients.seen(bench.project_id, client.id, bench.clock.now())
    assert await refusal(bench, saved.version_id) == "version_in_use"
    assert (await delete(bench, saved.version_id, force=True)).deleted_at is not None
    await undelete(bench, saved.version_id)
    async with bench.database.write() as unit:
        await unit.clients.finish(bench.project_id, client.id, Finish.SUCCESS, None, bench.clock.now())
    assert (await delete(bench, saved.version_id)).deleted_at is not None


async def test_the_only_thing_left_of_an_ended_session_is_deleted_only_by_force(bench: Bench) -> None:
    session = await bench.open()
    first, second = await saved_state(bench, session), await saved_state(bench, session)
    await stop(bench, session)

    await delete(bench, first.version_id)
    assert await refusal(bench, second.version_id) == "only_copy"
    assert (await delete(bench, second.version_id, force=True)).deleted_at is not None


async def test_a_state_that_a_queued_operation_loads_is_not_deleted(bench: Bench) -> None:
    session = await bench.open()
    saved = await saved_state(bench, session)
    await bench.submit(session, LoadState(version_id=saved.version_id, optimizer=True))

    assert await refusal(bench, saved.version_id, force=True) == "version_in_use"


async def test_a_version_that_a_replay_would_load_again_counts_as_used_until_a_snapshot_lies_behind_it(
    bench: Bench,
) -> None:
    session = await bench.open()
    saved, other = await saved_state(bench, session), await saved_state(bench, session)
    await bench.submit(session, LoadState(version_id=saved.version_id, optimizer=True))
    work = await bench.claimed()

    async def used(version_id: VersionId) -> bool:
        async with bench.database.read() as unit:
            return await unit.upkeep.is_used(version_id, at=bench.clock.now())

    assert await used(saved.version_id)
    loaded = LoadStateResult(version_id=saved.version_id, optimizer_step=1, discarded_gradient=False)
    await bench.finish(work, loaded)
    await delete(bench, saved.version_id, force=True)
    assert await used(saved.version_id)
    assert not await used(other.version_id)

    async with bench.database.write() as unit:
        snapshot = Snapshot(seq=work.operation.seq, location="snapshot")
        await unit.work.snapshot_taken(work.lease, snapshot, made_with={})
    assert not await used(saved.version_id)


async def test_only_what_was_deleted_long_enough_ago_is_due_to_be_purged_and_purging_frees_its_bytes(
    bench: Bench,
) -> None:
    session = await bench.open()
    old, young = await saved_state(bench, session), await saved_state(bench, session)
    await saved_state(bench, session)
    gone = (await delete(bench, old.version_id)).location
    bench.clock.advance(100)
    kept = (await delete(bench, young.version_id)).location

    async with bench.database.write() as unit:
        due = await unit.upkeep.deleted_before(bench.clock.now() - timedelta(seconds=50), limit=9)
        assert [one.id for one in due] == [old.version_id]
        await unit.upkeep.purged(old.version_id, at=bench.clock.now())
        await unit.upkeep.purged(old.version_id, at=bench.clock.now())
        assert await unit.upkeep.deleted_before(bench.clock.now() - timedelta(seconds=50), limit=9) == []
        assert await unit.collection.known([gone, kept]) == {kept}
        [group] = await unit.versions.groups(bench.project_id)
        history = await unit.registry.history(bench.project_id, "policy", limit=9)
    stored = await bench.database.look(
        lambda connection: dict(connection.execute(text("SELECT id, removed_at FROM usage_source_versions")).all())
    )
    assert stored.pop(old.version_id) == micros(bench.clock.now())  # storage is billed until then
    assert list(stored.values()) == [None, None]
    assert (group.versions, group.size_bytes) == (3, 2 * 1234)
    assert [line.event for line in history].count(Event.PURGED) == 1
    with pytest.raises(Conflict):
        await undelete(bench, old.version_id)


async def test_the_last_verdict_of_each_engine_is_kept(bench: Bench) -> None:
    saved = await bench.save(await bench.open())

    async def record(engine: str, occasion: Occasion, failure: str | None = None) -> Check:
        check = Check(
            version_id=saved.version_id,
            engine=engine,
            occasion=occasion,
            at=bench.clock.advance(1),
            report=None if failure else REPORT,
            failure=failure,
        )
        async with bench.database.write() as unit:
            await unit.upkeep.record_check(check)
        return check

    await record("http://a", Occasion.PUBLISH)
    other = await record("http://b", Occasion.PUBLISH)
    last = await record("http://a", Occasion.VERIFY, "mean 0.3 nats")

    async with bench.database.read() as unit:
        assert await unit.upkeep.checks([saved.version_id]) == {saved.version_id: [last, other]}


async def test_a_strangers_version_can_be_neither_named_nor_deleted(bench: Bench, clock: HandClock) -> None:
    stranger = await open_bench(bench.database, clock, "other")
    saved = await saved_state(bench, await bench.open())
    await set_alias(bench, saved.version_id)

    for attempt in (set_alias, delete, undelete):
        with pytest.raises(NotFound):
            await attempt(stranger, saved.version_id)
    async with bench.database.read() as unit:
        with pytest.raises(NotFound):
            await unit.versions.by_alias(stranger.project_id, "policy", "champion")
        assert await unit.registry.history(stranger.project_id, "policy", limit=9) == []


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tags": ("a", "a")}, "tags"),
        ({"tags": ("a b",)}, "tags[0]"),
        ({"tags": tuple(f"t{index}" for index in range(33))}, "tags"),
        ({"ttl_s": 0}, "ttl_seconds"),
        ({"ttl_s": 10**12}, "ttl_seconds"),
    ],
)
def test_labels_that_cannot_be_kept_are_refused(fields: dict[str, object], field: str) -> None:
    with pytest.raises(Invalid) as refused:
        Labels(**fields)  # pyright: ignore[reportArgumentType]
    assert refused.value.field == field
