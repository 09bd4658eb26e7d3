"""Scores in the loop: fair turns beside operations, exact artefacts, a retry bound; on the scripted backend."""

import asyncio
from pathlib import Path

import pytest

from gateway.core.errors import Kind
from gateway.core.ids import VersionId
from gateway.core.operations import Status
from gateway.core.payloads import OptimStep, Publish, SaveWeights
from gateway.core.results import Failure
from gateway.core.scores import Score, ScoreRequest, ScoreResult, score_alternatives, score_targets
from gateway.core.scripted import BASE_FINGERPRINT, SCRIPTED_NAME, scripted_logprob
from gateway.core.sessions import LoraConfig, Session
from gateway.core.tensors import TensorData
from gateway.core.usage import Meter
from gateway.core.versions import Version
from tests.trainer.builders import batch, forward_backward
from tests.trainer.world import LEASE_S, World, drain
from trainer.scoring import MAX_ATTACHED, MAX_ATTEMPTS, TOKENS_A_TURN
from trainer.scripted import ScriptedBackend, ScriptedScorer

STEP = OptimStep(learning_rate=1e-3)
SHORT = forward_backward(batch(1, lengths=(5, 3)))


def request(world: World, version: Version | None = None, length: int = 3) -> ScoreRequest:
    tokens = [(7 * place) % 500 for place in range(length)]
    return score_targets(world.base, version.id if version else None, tokens, [token + 1 for token in tokens])


async def ask(world: World, asked: ScoreRequest, session: Session | None = None) -> Score:
    async with world.database.write() as unit:
        return await unit.scores.add(
            asked,
            project_id=world.project_id,
            key_id=world.key_id,
            session_id=None if session is None else session.id,
            idempotency_key=None,
            request_digest="d",
        )


async def read(world: World, score: Score) -> Score:
    async with world.database.read() as unit:
        return await unit.scores.get(world.project_id, score.id)


async def claim_and_vanish(world: World) -> None:
    async with world.database.write() as unit:
        await unit.score_work.claim(owner="lost", base_model=world.base.name, lease_s=LEASE_S, at=world.clock.now())
    world.clock.advance(LEASE_S)


async def saved(world: World, backend: ScriptedBackend, count: int = 1) -> list[Version]:
    session = await world.open()
    save = SaveWeights(group="policy", publish=Publish.LAZY)
    for _ in range(count):
        await world.submit(session, SHORT, STEP, save)
    await drain(world.trainer(backend))
    return await world.versions()


def failure_of(score: Score) -> tuple[Kind, str]:
    assert isinstance(score.outcome, Failure)
    return score.outcome.kind, score.outcome.code


async def test_targets_and_alternatives_are_scored_and_paid_by_the_position(world: World) -> None:
    backend = ScriptedBackend(world.base)
    (version,) = await saved(world, backend)
    session = await world.open()
    one = await ask(world, request(world, version), session)
    rows = [[1, 2], [3, 4]]
    many = await ask(world, score_alternatives(world.base, None, [8, 9], rows, temperature=0.5))

    assert await world.trainer(backend).step()

    outcome = (await read(world, one)).outcome
    expected = [scripted_logprob(world.fingerprint(version), token, token + 1) for token in (0, 7, 14)]
    assert outcome == ScoreResult(logprobs=TensorData.floats(expected))
    flat = [scripted_logprob(BASE_FINGERPRINT, token, id) / 0.5 for token, row in zip([8, 9], rows) for id in row]  # noqa: B905
    assert (await read(world, many)).outcome == ScoreResult(logprobs=TensorData.floats(flat, (2, 2)))
    async with world.database.read() as unit:
        (fact,) = await unit.usage.of_source(one.id)
        (other,) = await unit.usage.of_source(many.id)
    assert (fact.meter, fact.quantity, fact.session_id, fact.version_id) == (Meter.PREFILL, 3, session.id, version.id)
    assert (other.quantity, other.session_id, other.version_id) == (2, None, None)


async def test_a_score_does_not_wait_behind_a_sessions_long_queue(world: World) -> None:
    session = await world.open()
    operations = await world.submit(session, *[SHORT] * 20)
    score = await ask(world, request(world))
    trainer = world.trainer(ScriptedBackend(world.base))

    await trainer.step()

    assert (await read(world, score)).status is Status.COMPLETED
    assert [(await world.read(operation)).status for operation in operations].count(Status.COMPLETED) == 1


async def test_many_scores_do_not_keep_an_operation_waiting(world: World) -> None:
    length = world.base.context_length
    scores = [await ask(world, request(world, length=length)) for _ in range(2 * TOKENS_A_TURN // length)]
    (operation,) = await world.submit(await world.open(), SHORT)
    trainer = world.trainer(ScriptedBackend(world.base))

    await trainer.step()

    assert (await world.read(operation)).status is Status.COMPLETED
    done = [score for score in scores if (await read(world, score)).final]
    assert len(done) * length == TOKENS_A_TURN
    assert await drain(trainer) == 1
    assert all([(await read(world, score)).final for score in scores])


async def test_a_score_wakes_an_idle_trainer(world: World) -> None:
    trainer = world.trainer(ScriptedBackend(world.base), heartbeat_s=30.0)
    running = asyncio.create_task(trainer.run())
    try:
        score = await ask(world, request(world))
        async with asyncio.timeout(20):
            seen = 0
            while not (await read(world, score)).final:
                seen = await world.database.wakeups.wait(seen, 5.0)
    finally:
        trainer.stop()
        await running


async def test_a_version_that_is_gone_or_damaged_is_named_and_costs_nothing(world: World) -> None:
    backend = ScriptedBackend(world.base)
    (version,) = await saved(world, backend)
    before = await world.trained_tokens()
    gone = await ask(world, score_targets(world.base, VersionId("ver-gone"), [1], [2]))
    (world.artifacts.path(version.location) / SCRIPTED_NAME).write_bytes(b'{"fingerprint": "forged"}')
    damaged = await ask(world, request(world, version))

    await drain(world.trainer(backend))

    assert failure_of(await read(world, gone)) == (Kind.NOT_FOUND, "unknown_version")
    assert failure_of(await read(world, damaged)) == (Kind.INTERNAL, "corrupt_artifact")
    assert backend.scorer.fingerprints == {}
    assert await world.trained_tokens() == before


async def test_a_score_that_loses_its_trainer_too_often_is_given_up_and_hurts_no_other(world: World) -> None:
    score = await ask(world, request(world))
    for _ in range(MAX_ATTEMPTS):
        await claim_and_vanish(world)
    other = await ask(world, request(world))
    (operation,) = await world.submit(await world.open(), SHORT)

    await drain(world.trainer(ScriptedBackend(world.base)))

    assert failure_of(await read(world, score)) == (Kind.INTERNAL, "poison_score")
    assert (await read(world, other)).status is Status.COMPLETED
    assert (await world.read(operation)).status is Status.COMPLETED


async def test_a_lost_score_is_computed_by_the_next_trainer(world: World) -> None:
    score = await ask(world, request(world))
    await claim_and_vanish(world)

    await drain(world.trainer(ScriptedBackend(world.base)))

    assert (await read(world, score)).status is Status.COMPLETED


async def test_the_heartbeat_keeps_a_long_score(world: World) -> None:
    await ask(world, request(world))
    trainer_log = world.trainer(ScriptedBackend(world.base))._log  # pyright: ignore[reportPrivateUsage]
    assert await trainer_log.claim_score() is not None
    for _ in range(3):
        world.clock.advance(LEASE_S - 1)
        await trainer_log.renew()
    other_log = world.trainer(ScriptedBackend(world.base))._log  # pyright: ignore[reportPrivateUsage]
    assert await other_log.claim_score() is None


async def test_only_the_versions_asked_for_last_stay_attached(world: World) -> None:
    backend = ScriptedBackend(world.base)
    versions = await saved(world, backend, MAX_ATTACHED + 1)
    scores = [await ask(world, request(world, version)) for version in [*versions, versions[1]]]

    await drain(world.trainer(backend))

    assert list(backend.scorer.fingerprints) == [version.id for version in versions[1:]]
    assert {(await read(world, score)).status for score in scores} == {Status.COMPLETED}


class FaultyScorer(ScriptedScorer):
    """Crashes, then has no memory, then answers with a number that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.crashes = ["a defect", "CUDA out of memory. Tried to allocate 2.00 GiB"]

    def score(self, request: ScoreRequest) -> TensorData:
        if self.crashes:
            raise RuntimeError(self.crashes.pop(0))
        return TensorData.floats([0.0] * (request.targets.size - 1) + [float("nan")], request.targets.shape)

    def attach(self, version_id: VersionId, lora: LoraConfig, directory: Path) -> None:
        assert version_id not in self.fingerprints, "attached twice"
        super().attach(version_id, lora, directory)


@pytest.mark.filterwarnings("ignore")
async def test_a_crash_and_a_lack_of_memory_end_one_score_each_and_nan_is_never_an_answer(world: World) -> None:
    backend = ScriptedBackend(world.base)
    (version,) = await saved(world, backend)
    backend.scorer = FaultyScorer()
    crashed = await ask(world, request(world, version))
    starved = await ask(world, request(world, version))
    undefined = await ask(world, request(world, version))

    await drain(world.trainer(backend))

    assert failure_of(await read(world, crashed)) == (Kind.INTERNAL, "trainer_error")
    assert failure_of(await read(world, starved)) == (Kind.INVALID, "out_of_memory")
    assert failure_of(await read(world, undefined)) == (Kind.INTERNAL, "non_finite_logprob")
    outcome = (await read(world, undefined)).outcome
    assert isinstance(outcome, Failure)
    assert outcome.details == {"position": 2}
