"""Lost trainers with the real backend on the real store: the recovered run has the bits of the uninterrupted one."""

import errno
from pathlib import Path

import peft
import pytest
import torch
import transformers

from gateway.core.ids import SessionId
from gateway.core.operations import Status
from gateway.core.payloads import LoadState, LossFn, OptimStep, Payload, Publish, SaveState, SaveWeights
from gateway.core.results import Failure, ForwardResult
from gateway.core.versions import Labels
from tests.trainer.builders import A, batch, forward, forward_backward, lora, policy_batch
from tests.trainer.conftest import CPU, ON_BOTH, make_backend
from tests.trainer.states import Bits, state_of
from tests.trainer.test_backend import overflowing
from tests.trainer.world import LEASE_S, World, drain
from trainer.peft_backend import PeftBackend

CONFIG = lora(unembed=True)
STEP = OptimStep(learning_rate=1e-2, grad_clip_norm=1.0)
RUN: list[Payload] = [
    forward_backward(batch(1)),
    STEP,
    forward(batch(2)),
    forward_backward(policy_batch(3), LossFn.PPO),
    forward_backward(batch(4)),
    STEP,
    forward_backward(batch(5)),
    STEP,
]


def alone(backend: PeftBackend, *payloads: Payload) -> Bits:
    """Return the state after ``payloads`` without any loop."""
    backend.open(A, CONFIG)
    for payload in payloads:
        if isinstance(payload, OptimStep):
            backend.optim_step(A, payload)
        elif isinstance(payload, type(RUN[0])):
            backend.forward_backward(A, payload)
    return state_of(backend, A)


async def run_with_losses(world: World, lost_after: set[int], **limits: float) -> tuple[PeftBackend, SessionId]:
    """Run ``RUN``; after these operations the trainer is lost with everything in its memory."""
    session = await world.open(CONFIG)
    backend = make_backend(world.base)
    trainer = world.trainer(backend, **limits)
    for number, payload in enumerate(RUN, start=1):
        (operation,) = await world.submit(session, payload)
        await drain(trainer)
        assert (await world.read(operation)).status is Status.COMPLETED
        if number in lost_after:
            world.clock.advance(LEASE_S + 1)
            backend = make_backend(world.base)
            trainer = world.trainer(backend, **limits)
    return backend, session.id


@ON_BOTH
@pytest.mark.parametrize("snapshot_after_s", [1e9, 0.0], ids=["replay", "snapshots"])
@pytest.mark.parametrize("lost_after", [{4}, {1, 2, 5}, {7}], ids=str)
async def test_a_run_that_lost_its_trainers_ends_bit_equal(
    world: World, lost_after: set[int], snapshot_after_s: float
) -> None:
    backend, session = await run_with_losses(world, lost_after, snapshot_after_s=snapshot_after_s)

    assert state_of(backend, session) == alone(make_backend(world.base), *RUN)
    expected = 5 * sum((24, 9, 17, 24))
    assert await world.trained_tokens() == expected


async def test_a_session_keeps_its_rules_whatever_the_next_trainer_is_set_to(world: World) -> None:
    session = await world.open(CONFIG)
    await world.submit(session, *RUN[:5])
    await drain(world.trainer(make_backend(world.base, micro_batch_tokens=64)))
    world.clock.advance(LEASE_S + 1)
    await world.submit(session, *RUN[5:])
    await world.kernels.run(lambda: torch.set_num_threads(2))
    other = make_backend(world.base, micro_batch_tokens=8192)
    try:
        await drain(world.trainer(other))
        threads = await world.kernels.run(torch.get_num_threads)
    finally:
        await world.kernels.run(lambda: torch.set_num_threads(1))

    assert state_of(other, session.id) == alone(make_backend(world.base, micro_batch_tokens=64), *RUN)
    assert state_of(other, session.id) != alone(make_backend(world.base, micro_batch_tokens=8192), *RUN)
    assert threads == 1


async def test_a_session_keeps_what_computed_it_device_precision_and_the_installed_libraries(world: World) -> None:
    session = await world.open(CONFIG)
    await world.submit(session, RUN[0])
    await drain(world.trainer(make_backend(world.base)))

    kept = (await world.session(session)).made_with
    assert kept is not None
    device = kept["device"]
    assert device.startswith("cpu ")
    assert kept == {
        "device": device,
        "compute_dtype": "float32",
        "head_dtype": "float32",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
    }


class Unsnapshotted(PeftBackend):
    """Whose disk takes versions, but no snapshots."""

    def write_snapshot(self, session_id: SessionId, directory: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@ON_BOTH
async def test_a_load_is_part_of_a_replay_where_no_snapshot_could_be_written_after_it(world: World) -> None:
    session = await world.open(CONFIG)
    first = world.trainer(make_backend(world.base))
    await world.submit(session, RUN[0], STEP, SaveState(group="policy"), RUN[3])
    await drain(first)
    (state,) = await world.versions()
    load = LoadState(version_id=state.id, optimizer=True)
    await world.submit(session, load, RUN[4], STEP)
    full = Unsnapshotted(world.base, device=CPU, compute_dtype="float32", micro_batch_tokens=128)
    await drain(world.trainer(full))
    snapshot = (await world.session(session)).snapshot
    assert snapshot is not None
    assert snapshot.seq == 3
    world.clock.advance(LEASE_S + 1)
    last = make_backend(world.base)
    await world.submit(session, forward(batch(1)))
    await drain(world.trainer(last))

    assert state_of(last, session.id) == alone(make_backend(world.base), RUN[0], STEP, RUN[4], STEP)


async def test_a_batch_that_is_not_finite_breaks_the_window_and_nothing_else(world: World) -> None:
    session = await world.open(CONFIG)
    bad = forward_backward(overflowing(policy_batch(1)), LossFn.IMPORTANCE_SAMPLING)
    backend = make_backend(world.base)
    operations = await world.submit(session, RUN[0], STEP, RUN[3], bad, STEP, RUN[4], STEP)

    await drain(world.trainer(backend))

    outcomes = [(await world.read(operation)).outcome for operation in operations]
    assert isinstance(outcomes[3], Failure)
    assert outcomes[3].code == "non_finite_loss"
    assert isinstance(outcomes[4], Failure)
    assert (outcomes[4].code, outcomes[4].details["seq"]) == ("incomplete_window", 4)
    assert isinstance(outcomes[5], ForwardResult)
    assert state_of(backend, session.id) == alone(make_backend(world.base), RUN[0], STEP, RUN[4], STEP)


async def test_a_saved_adapter_is_a_version_whose_files_and_canary_verify(world: World) -> None:
    session = await world.open(CONFIG)
    (_, _, save) = await world.submit(
        session, RUN[0], STEP, SaveWeights(group="policy", publish=Publish.LAZY, labels=Labels(description="one step"))
    )

    await drain(world.trainer(make_backend(world.base)))

    (version,) = await world.versions()
    assert (await world.read(save)).status is Status.COMPLETED
    assert version.location == f"{version.id}-1"
    assert (version.seq, version.optimizer_step, version.labels.description) == (3, 1, "one step")
    manifest = world.artifacts.verify(version.location, version.manifest_sha256)
    assert sorted(manifest.files) == ["adapter_config.json", "adapter_model.safetensors"]
    assert manifest.canary is not None
    assert manifest.canary.logprobs != manifest.canary.base_logprobs
    assert version.size_bytes == manifest.size_bytes
