"""Memory: refused before it runs what cannot fit, and bounded what runs, however much of it there is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gateway.core.catalog import BaseModel
from gateway.core.errors import Invalid
from gateway.core.payloads import LossFn
from gateway.core.results import Failure, ForwardResult
from tests.trainer.builders import A, batch, forward_backward, lora, policy_batch
from tests.trainer.states import gradients, state_of
from tests.trainer.test_backend import alternatives, logprobs, with_input
from tests.trainer.world import World, drain
from trainer.memory import MIB, peak_bytes
from trainer.peft_backend import PeftBackend

SMALL_LIMIT = 112 * MIB


def limited(base: BaseModel, limit: int = SMALL_LIMIT, *, lean: bool = True) -> PeftBackend:
    return PeftBackend(
        base,
        device=torch.device("cpu"),
        compute_dtype="float32",
        micro_batch_tokens=64,
        operation_bytes=limit,
        lean=lean,
    )


def refusal(backend: PeftBackend, *lengths: int, k: int = 1) -> Invalid:
    data = batch(1, lengths) if k == 1 else alternatives(1, lengths, k)
    with pytest.raises(Invalid) as refused:
        backend.check(A, forward_backward(data))
    return refused.value


def test_a_datum_that_cannot_fit_is_refused_with_its_place_and_the_longest_that_fits(base: BaseModel) -> None:
    backend = limited(base)
    backend.open(A, lora())

    error = refusal(backend, 8, 20_000, 9)

    assert (error.code, error.field) == ("memory_limit_exceeded", "data[1].model_input")
    longest = int(error.details["limit"])
    assert (error.details["datum"], error.details["got"]) == (1, 20_000)
    assert "112 MiB" in error.message
    assert str(longest) in error.message
    backend.check(A, forward_backward(batch(1, (longest,) * 40)))
    assert refusal(backend, longest + 1).details["limit"] == longest
    assert int(refusal(backend, longest, k=64).details["limit"]) < longest / 2


def test_the_verdict_is_the_same_whatever_memory_the_process_holds(base: BaseModel) -> None:
    backend = limited(base)
    backend.open(A, lora())
    before = refusal(backend, 20_000)
    held = torch.ones(400 * MIB // 4)
    backend.forward_backward(A, forward_backward(batch(2)))

    assert refusal(backend, 20_000).details == before.details
    assert held.numel() * 4 > SMALL_LIMIT


async def test_a_refused_operation_fails_before_it_runs_and_a_replay_refuses_nothing(world: World) -> None:
    """The second trainer allows too little for what the first one computed, and rebuilds the session all the same."""
    session = await world.open()
    long = forward_backward(batch(1, (900,)))
    generous = limited(world.base, 256 * MIB)
    done, *_ = await world.submit(session, long)
    await drain(world.trainer(generous))
    assert isinstance((await world.read(done)).outcome, ForwardResult)
    expected = state_of(generous, session.id)
    world.clock.advance(16)

    stingy = limited(world.base, 104 * MIB)
    refused, *_ = await world.submit(session, long)
    await drain(world.trainer(stingy))

    outcome = (await world.read(refused)).outcome
    assert isinstance(outcome, Failure)
    assert outcome.code == "memory_limit_exceeded"
    assert state_of(stingy, session.id) == expected


def test_micro_batches_that_do_not_fit_are_a_wrong_setting(base: BaseModel) -> None:
    with pytest.raises(ValueError, match="LOOPLINE_OPERATION_BYTES"):
        limited(base, 16 * MIB)


def test_checkpointing_the_plain_way_gives_equal_bits(base: BaseModel) -> None:
    """A temperature per datum takes the plain way."""
    data = tuple(with_input(datum, "temperature", [0.7]) for datum in policy_batch(3, (2000, 33)))
    payload = forward_backward(data, LossFn.PPO)
    found: list[tuple[list[float], torch.Tensor]] = []
    for limit, checkpoints in ((4096 * MIB, False), (128 * MIB, True)):
        backend = limited(base, limit)
        assert backend.passes.footprint.checkpoints(2000) is checkpoints
        backend.open(A, lora(unembed=True))
        result = backend.forward_backward(A, payload)
        assert result.metrics["lean_decoder:mean"] == 0
        found.append((logprobs(result), gradients(backend, A)))

    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.slow
def test_peak_memory_stays_below_its_bound_and_does_not_grow_with_the_datums(model_dir: Path) -> None:
    """In a process of its own, where freed memory goes back to the system at once."""
    cases = ["lean:16x256", "lean:96x256", "lean:1x3000", "lean:8x256x16", "plain:16x128", "plain:64x128"]
    cases += ["plain:1x1500"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainer.memory_probe", str(model_dir), "float32", *cases],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )
    found = json.loads(done.stdout)
    for name, case in found.items():
        assert case["rose"] < case["bound"], (name, found)
    for few, many in (("lean:16x256", "lean:96x256"), ("plain:16x128", "plain:64x128")):
        more_tokens = found[many]["tokens"] - found[few]["tokens"]
        assert found[many]["rose"] - found[few]["rose"] < 8 * MIB + 16 * more_tokens, found


def test_the_peak_is_the_programs_own_and_not_its_parents() -> None:
    held = b"x" * (400 << 20)
    code = "from trainer.memory import peak_bytes; print(peak_bytes())"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert peak_bytes() > len(held)
    assert int(child.stdout) < len(held)
