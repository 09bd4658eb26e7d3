"""Many sessions on one process: device, host and disk, and nobody's state in anybody else's."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from gateway.core.catalog import BaseModel
from gateway.core.ids import SessionId
from gateway.core.payloads import ForwardBackward, LossFn, OptimStep, Payload
from gateway.core.sessions import LoraConfig
from tests.trainer.builders import batch, forward_backward, lora, policy_batch
from tests.trainer.conftest import make_backend
from tests.trainer.states import Bits, state_of
from tests.trainer.world import World
from trainer.peft_backend import PeftBackend

CLIPPED = OptimStep(learning_rate=1e-2, grad_clip_norm=0.5)
FREE = OptimStep(learning_rate=3e-3, weight_decay=0.1, lora_plus_lr_ratio=4.0)
LENGTHS = (9, 5)
KINDS: Sequence[tuple[LoraConfig, Sequence[Payload]]] = (
    (lora(unembed=True, seed=1), (forward_backward(batch(1, LENGTHS)), CLIPPED)),
    (lora(rank=2, mlp=False, seed=2), (forward_backward(policy_batch(2, LENGTHS), LossFn.PPO), FREE)),
    (lora(attn=False, seed=3), (forward_backward(batch(3, LENGTHS), temperature=0.7), FREE)),
    (lora(rank=8, seed=4), (forward_backward(policy_batch(4, LENGTHS), LossFn.IMPORTANCE_SAMPLING), CLIPPED)),
)


def run(backend: PeftBackend, session: SessionId, payload: Payload) -> float | None:
    """Run one payload; return the norm of a step."""
    if isinstance(payload, OptimStep):
        return backend.optim_step(session, payload).metrics["grad_norm:mean"]
    assert isinstance(payload, ForwardBackward)
    backend.forward_backward(session, payload)
    return None


@dataclass(frozen=True)
class Alone:
    """A kind of session by itself: its state after one round and after two, and its norms."""

    first: Bits
    second: Bits
    norms: list[float | None]


@pytest.fixture(scope="module")
def alone(base: BaseModel, device: torch.device) -> list[Alone]:
    found: list[Alone] = []
    for config, payloads in KINDS:
        backend, session = make_backend(base, device=device), SessionId("sess-alone")
        backend.open(session, config)
        norms = [run(backend, session, payload) for payload in payloads]
        first = state_of(backend, session)
        norms += [run(backend, session, payload) for payload in payloads]
        found.append(Alone(first, state_of(backend, session), norms))
    return found


def test_sessions_that_wait_on_the_host_go_on_bit_equal(
    base: BaseModel, device: torch.device, alone: list[Alone]
) -> None:
    """Nine sessions take turns on a device with room for two, in the middle of their windows too."""
    backend = make_backend(base, max_on_device=2, device=device)
    sessions = [SessionId(f"sess-{number}") for number in range(9)]
    norms: dict[SessionId, list[float | None]] = {session: [] for session in sessions}
    for number, session in enumerate(sessions):
        backend.open(session, KINDS[number % 4][0])
    for turn in range(4):
        for number, session in enumerate(sessions):
            norms[session].append(run(backend, session, KINDS[number % 4][1][turn % 2]))
            assert backend.tenants.on_device <= 2
            torch.rand(number + 1)  # whatever the process' own generator does

    for number, session in enumerate(sessions):
        assert state_of(backend, session) == alone[number % 4].second
        assert norms[session] == alone[number % 4].norms
    for session in sessions:
        backend.close(session)
    assert backend.tenants.on_device == 0


async def test_a_hundred_sessions_share_a_process_that_holds_four(
    world: World, alone: list[Alone], base: BaseModel, device: torch.device
) -> None:
    """Two on the device, two on the host, the others on disk: every operation finds its session parked, mid-window."""
    backend = make_backend(base, max_on_device=2, device=device)
    trainer = world.trainer(backend, max_resident=4)
    sessions = [await world.open(KINDS[number % 4][0]) for number in range(100)]
    for turn in range(2):
        for number, session in enumerate(sessions):
            await world.submit(session, KINDS[number % 4][1][turn])
        while await trainer.step():
            assert backend.tenants.on_device <= 2
    await trainer.park_all()
    assert backend.tenants.on_device == 0

    for number, session in enumerate(sessions):
        snapshot = (await world.session(session)).snapshot
        assert snapshot is not None
        assert snapshot.seq == 2
        backend.restore(session.id, session.lora, world.artifacts.path(snapshot.location))
        assert state_of(backend, session.id) == alone[number % 4].first
        backend.close(session.id)
