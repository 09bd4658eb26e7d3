"""Memory that runs out in the middle of a computation: that operation fails, and nothing else is different."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gateway.core.catalog import BaseModel
from gateway.core.errors import Kind
from gateway.core.ids import SessionId
from gateway.core.operations import Status
from gateway.core.payloads import ForwardBackward, LossFn, OptimStep
from gateway.core.results import Failure, ForwardResult, OptimStepResult
from gateway.core.sessions import SessionStatus
from tests.trainer.builders import A, B, batch, forward_backward, lora, policy_batch
from tests.trainer.conftest import make_backend
from tests.trainer.states import state_of
from tests.trainer.test_recovery import CONFIG, STEP, alone
from tests.trainer.world import LEASE_S, World, drain
from trainer import dispatch
from trainer.out_of_memory import ran_out_of_memory
from trainer.peft_backend import PeftBackend
from trainer.progress import Note, unnoted

Raise = Callable[[], object]
IMPOSSIBLE = 1 << 60


def from_torch() -> object:
    return torch.empty(IMPOSSIBLE, dtype=torch.uint8)


def from_device() -> object:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def from_python() -> object:
    raise MemoryError


class Starve(TorchDispatchMode):
    """Counts torch's operations; at number ``at`` there is no memory. 0: there always is."""

    def __init__(self, at: int = 0, run_out: Raise = from_torch) -> None:
        super().__init__()
        self.at, self.calls, self._run_out = at, 0, run_out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        if self.calls == self.at:
            with self._off():
                self._run_out()
        return func(*args, **(kwargs or {}))

    @contextmanager
    def _off(self) -> Generator[None]:
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():
            yield


@pytest.mark.parametrize("run_out", [from_torch, from_device, from_python])
def test_every_shape_that_it_takes_is_known_and_other_failures_are_not(run_out: Raise) -> None:
    with pytest.raises((MemoryError, RuntimeError)) as raised:
        run_out()

    assert ran_out_of_memory(raised.value)
    assert not ran_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "plain"])
async def test_a_batch_for_which_memory_runs_out_anywhere_fails_as_the_users_and_changes_no_bit(
    world: World, base: BaseModel, lean: bool
) -> None:
    session = await world.open(CONFIG)
    backend = PeftBackend(base, device=torch.device("cpu"), compute_dtype="float32", micro_batch_tokens=64, lean=lean)
    backend.open(session.id, CONFIG)
    first, second = forward_backward(batch(1)), forward_backward(policy_batch(2), LossFn.PPO)
    dispatch.run(backend, session, first)
    before = state_of(backend, session.id)
    with Starve() as fed:
        dispatch.run(backend, session, second)
    after = state_of(backend, session.id)
    backend.discard_window(session.id)
    dispatch.run(backend, session, first)

    for at in range(1, fed.calls, fed.calls // 12):
        with Starve(at):
            done = dispatch.run(backend, session, second)
        assert isinstance(done.outcome, Failure), at
        assert (done.outcome.kind, done.outcome.code, done.outcome.field) == (Kind.INVALID, "out_of_memory", "data")
        assert done.trained_tokens == 0
        assert state_of(backend, session.id) == before, at

    assert isinstance(dispatch.run(backend, session, second).outcome, ForwardResult)
    assert state_of(backend, session.id) == after


def test_a_session_that_cannot_come_to_the_device_stays_on_the_host_whole(base: BaseModel) -> None:
    backend = make_backend(base, max_on_device=1)
    for session_id in (A, B):
        backend.open(session_id, lora())
        backend.forward_backward(session_id, forward_backward(batch(1)))
    waiting = state_of(backend, A)
    with Starve() as fed:
        backend.optimizer_step(A)
    backend.optimizer_step(B)

    for at in range(1, fed.calls, fed.calls // 6):
        with Starve(at), pytest.raises(RuntimeError):
            backend.optimizer_step(A)
        assert state_of(backend, A) == waiting
        backend.optimizer_step(B)

    assert backend.optimizer_step(A) == 0


class Starved(PeftBackend):
    """Runs out of memory in the operations whose number (from 1) is in ``short``, at torch's ``at``-th call."""

    short: frozenset[int] = frozenset()
    at = 5
    number = 0

    def forward_backward(self, session_id: SessionId, payload: ForwardBackward, note: Note = unnoted) -> ForwardResult:
        with self._meal():
            return super().forward_backward(session_id, payload, note)

    def optim_step(self, session_id: SessionId, payload: OptimStep) -> OptimStepResult:
        with self._meal():
            return super().optim_step(session_id, payload)

    def _meal(self) -> Starve:
        self.number += 1
        return Starve(self.at if self.number in self.short else 0)


def starved(base: BaseModel, *short: int) -> Starved:
    backend = Starved(base, device=torch.device("cpu"), compute_dtype="float32", micro_batch_tokens=128)
    backend.short = frozenset(short)
    return backend


async def test_the_trainer_lives_on_and_a_half_taken_step_is_undone(world: World) -> None:
    session = await world.open(CONFIG)
    whole, step = forward_backward(batch(1)), OptimStep(learning_rate=1e-2, lora_plus_lr_ratio=4.0)
    backend = starved(world.base, 3, 5)  # the second batch, and the second step: the one in between never begins
    backend.at = 25  # of a step: A matrices have moved, B matrices have not
    operations = await world.submit(session, whole, step, whole, step, whole, step, whole, step)

    assert await drain(world.trainer(backend)) == 8

    found = [await world.read(operation) for operation in operations]
    codes = [each.outcome.code if isinstance(each.outcome, Failure) else "" for each in found]
    assert codes == ["", "", "out_of_memory", "incomplete_window", "", "trainer_out_of_memory", "", ""]
    assert isinstance(failure := found[5].outcome, Failure)
    assert failure.kind is Kind.UNAVAILABLE
    assert state_of(backend, session.id) == alone(make_backend(world.base), whole, step, whole, step)


async def test_rebuilds_that_lack_memory_end_no_session_however_many(world: World) -> None:
    session = await world.open(CONFIG)
    whole = forward_backward(batch(1))
    await world.submit(session, whole, STEP)
    await drain(world.trainer(make_backend(world.base)))
    world.clock.advance(LEASE_S + 1)
    backend = starved(world.base, *range(1, 8))
    operations = await world.submit(session, *[whole] * 7, STEP, whole, STEP)

    await drain(world.trainer(backend))

    found = [await world.read(operation) for operation in operations]
    assert [each.status for each in found[-2:]] == [Status.COMPLETED] * 2
    assert {each.outcome.code for each in found[:7] if isinstance(each.outcome, Failure)} == {"trainer_out_of_memory"}
    assert (await world.session(session)).status is SessionStatus.RUNNING
    assert state_of(backend, session.id) == alone(make_backend(world.base), whole, STEP, whole, STEP)
