"""Session state to disk and back: bit-equal to never having stopped."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gateway.core.catalog import BaseModel
from gateway.core.errors import Invalid
from gateway.core.payloads import LossFn, OptimStep
from tests.trainer.builders import A, B, batch, forward_backward, lora, policy_batch
from tests.trainer.conftest import make_backend
from tests.trainer.states import state_of, weights
from tests.trainer.test_backend import trained
from trainer.backend import CorruptState
from trainer.peft_backend import PeftBackend

CONFIG = lora(unembed=True)
STEP = OptimStep(learning_rate=1e-2, weight_decay=0.1)


def go_on(backend: PeftBackend) -> None:
    """The rest of a run: into an open window, a step, and once more."""
    backend.forward_backward(A, forward_backward(policy_batch(6), LossFn.PPO))
    backend.optim_step(A, STEP)
    backend.forward_backward(A, forward_backward(batch(7)))
    backend.optim_step(A, STEP)


def test_a_parked_session_continues_bit_equal_in_the_middle_of_a_window(backend: PeftBackend, tmp_path: Path) -> None:
    backend.open(A, CONFIG)
    trained(backend, A)
    backend.forward_backward(A, forward_backward(batch(5)))
    backend.write_snapshot(A, tmp_path)
    at_snapshot = state_of(backend, A)
    go_on(backend)
    expected = state_of(backend, A)

    backend.close(A)
    backend.open(B, lora(seed=99))
    trained(backend, B)
    backend.restore(A, CONFIG, tmp_path)

    assert state_of(backend, A) == at_snapshot
    go_on(backend)
    assert state_of(backend, A) == expected


CONTINUE = """
import sys, json
from pathlib import Path
import torch
from tests.trainer.builders import A, tiny_base
from tests.trainer.conftest import make_backend
from tests.trainer.test_states import CONFIG, go_on
from trainer.peft_backend import configure_torch
configure_torch(threads=1)
model, snapshot, result = map(Path, sys.argv[1:])
backend = make_backend(tiny_base(model))
backend.restore(A, CONFIG, snapshot)
go_on(backend)
result.mkdir()
backend.write_snapshot(A, result)
"""


def test_a_new_process_continues_bit_equal(base: BaseModel, backend: PeftBackend, tmp_path: Path) -> None:
    snapshot, result, expected = tmp_path / "snapshot", tmp_path / "result", tmp_path / "expected"
    for directory in (snapshot, expected):
        directory.mkdir()
    backend.open(A, CONFIG)
    trained(backend, A)
    backend.forward_backward(A, forward_backward(batch(5)))
    backend.write_snapshot(A, snapshot)
    go_on(backend)
    backend.write_snapshot(A, expected)

    subprocess.run(
        [sys.executable, "-c", CONTINUE, str(base.path), str(snapshot), str(result)],
        check=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )

    for name in ("state.safetensors", "state.json"):
        assert (result / name).read_bytes() == (expected / name).read_bytes()


def test_loading_with_optimizer_equals_going_on_and_weights_alone_do_not(
    backend: PeftBackend, base: BaseModel, tmp_path: Path
) -> None:
    backend.open(A, CONFIG)
    trained(backend, A)
    backend.write_state(A, tmp_path)
    saved = weights(backend, A)
    go_on(backend)
    kept_going = state_of(backend, A)

    backend.open(B, CONFIG)
    loaded = backend.load_state(A, tmp_path, optimizer=True)
    assert (loaded.optimizer_step, loaded.discarded_gradient) == (2, False)
    assert torch.equal(weights(backend, A), saved)
    go_on(backend)
    assert state_of(backend, A) == kept_going

    fresh = backend.load_state(A, tmp_path, optimizer=False)
    assert fresh.optimizer_step == 0
    state = backend.state(A)
    assert torch.equal(weights(backend, A), saved)
    assert all(not tensor.any() for tensor in (*state.moments.first, *state.moments.second))
    go_on(backend)
    assert state_of(backend, A) != kept_going


def test_a_load_throws_the_open_window_away_and_says_so(backend: PeftBackend, tmp_path: Path) -> None:
    backend.open(A, CONFIG)
    backend.forward_backward(A, forward_backward(batch(5)))
    backend.write_state(A, tmp_path)

    assert backend.load_state(A, tmp_path, optimizer=True).discarded_gradient
    assert backend.state(A).window is None
    assert not json.loads((tmp_path / "state.json").read_bytes())["window"]


def missing(directory: Path) -> None:
    tensors = load_file(directory / "state.safetensors")
    del tensors[next(name for name in tensors if name.startswith("second/"))]
    save_file(tensors, directory / "state.safetensors")


def truncated(directory: Path) -> None:
    path = directory / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def other_format(directory: Path) -> None:
    record = json.loads((directory / "state.json").read_bytes())
    (directory / "state.json").write_text(json.dumps(record | {"format": 99}))


@pytest.mark.parametrize("damage", [missing, truncated, other_format])
def test_a_damaged_state_is_refused_and_the_session_stays_as_it_was(
    backend: PeftBackend,
    tmp_path: Path,
    damage,  # pyright: ignore
) -> None:
    backend.open(A, CONFIG)
    trained(backend, A)
    backend.write_state(A, tmp_path)
    damage(tmp_path)
    before = state_of(backend, A)

    with pytest.raises(CorruptState):
        backend.load_state(A, tmp_path, optimizer=True)

    assert state_of(backend, A) == before


def test_a_snapshot_of_another_config_is_refused(base: BaseModel, device: torch.device, tmp_path: Path) -> None:
    backend = make_backend(base, device=device)
    backend.open(A, lora(rank=4, seed=1))
    backend.write_snapshot(A, tmp_path)
    backend.close(A)

    with pytest.raises(CorruptState):
        backend.restore(A, lora(rank=2, seed=1), tmp_path)
    with pytest.raises(CorruptState):
        backend.restore(A, lora(rank=4, seed=2), tmp_path)


def test_a_state_of_another_scale_is_refused_and_the_session_stays_as_it_was(
    backend: PeftBackend, tmp_path: Path
) -> None:
    backend.open(A, lora(rslora=True))
    trained(backend, A)
    backend.write_state(A, tmp_path)
    backend.open(B, lora())
    trained(backend, B)
    before = state_of(backend, B)

    with pytest.raises(Invalid, match="use_rslora True") as refused:
        backend.load_state(B, tmp_path, optimizer=True)

    assert refused.value.code == "lora_mismatch"
    assert state_of(backend, B) == before
