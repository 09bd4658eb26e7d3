"""The whole way of an operation, from datums to gradients, against plain transformers in float32."""

import json
import random
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gateway.core.catalog import BaseModel
from gateway.core.payloads import ForwardBackward, LossFn, OptimStep
from gateway.core.sessions import LoraConfig
from gateway.core.tensors import Datum, TensorData
from tests.trainer.builders import VOCAB, A, batch, forward, forward_backward, lora, tiny_base
from tests.trainer.conftest import make_backend
from tests.trainer.plain import Plain
from tests.trainer.states import gradients, weights
from tests.trainer.test_losses import reference
from trainer.batching import to_tensor
from trainer.peft_backend import PeftBackend

CLIPS = ("clip_low_threshold", "clip_high_threshold")
CONFIG = lora(unembed=True)


@pytest.fixture(scope="module")
def trained_backend(base: BaseModel, device: torch.device) -> PeftBackend:
    """A session whose adapter has moved, so that no gradient is zero by construction."""
    backend = make_backend(base, device=device)
    backend.open(A, CONFIG)
    move(backend)
    return backend


@pytest.fixture(scope="module")
def plain(base: BaseModel) -> Plain:
    return Plain(base.path)


def move(backend: PeftBackend) -> None:
    for seed in (11, 12):
        backend.forward_backward(A, forward_backward(batch(seed)))
        backend.optim_step(A, OptimStep(learning_rate=1e-3))


def masters_of(backend: PeftBackend) -> dict[str, Tensor]:
    return {name: m.detach().cpu().clone().requires_grad_() for name, m in backend.state(A).weights.items()}


def drawn_datum(
    rng: random.Random, tokens: list[int], loss_fn: LossFn, options: Mapping[str, Any], likely: list[float]
) -> Datum:
    """Return a datum of ``tokens`` with every input that ``options`` asks for; ``likely`` are near its logprobs."""
    n = len(tokens)
    inputs: dict[str, TensorData] = {}
    if loss_fn is LossFn.CROSS_ENTROPY:
        k: int = options["k"]
        shape = (n,) if k == 0 else (n, k)
        size = n * max(k, 1)
        inputs["target_tokens"] = TensorData.ints(rng.choices(range(VOCAB), k=size), shape)
        inputs["weights"] = TensorData.floats([rng.choice([0.0, rng.uniform(-2, 2)]) for _ in range(size)], shape)
    else:
        inputs["target_tokens"] = TensorData.ints(rng.choices(range(VOCAB), k=n))
        inputs["logprobs"] = TensorData.floats([lp + rng.gauss(0, 0.5) for lp in likely])
        inputs["advantages"] = TensorData.floats([rng.choice([0.0, rng.gauss(0, 1)]) for _ in range(n)])
        if options["weighted"]:
            inputs["weights"] = TensorData.floats([rng.choice([0.0, rng.uniform(-2, 2)]) for _ in range(n)])
        if options["kl"]:
            inputs["ref_log_prob"] = TensorData.floats([lp + rng.gauss(0, 0.5) for lp in likely])
        if loss_fn is LossFn.GSPO:
            mask = [rng.choice([0.0, 1.0]) for _ in range(n)]
            inputs["sequence_ratio_mask"] = TensorData.floats([1.0, *mask[1:]])
        if options["clips"] and loss_fn in (LossFn.PPO, LossFn.CISPO, LossFn.GSPO):
            for name in CLIPS:
                inputs[name] = TensorData.floats([rng.random() + ("high" in name) for _ in range(n)])
    if options["temperature"] == "datum":
        inputs["temperature"] = TensorData.floats([rng.uniform(0.5, 2.0)])
    return Datum(model_input=TensorData.ints(tokens), loss_fn_inputs=inputs)


def retargeted(backend: PeftBackend, payload: ForwardBackward, rng: random.Random) -> ForwardBackward:
    """Put sampler and reference log-probabilities near what the adapter computes, so that ratios are near 1."""
    probe = tuple(
        replace(
            datum,
            loss_fn_inputs={
                "target_tokens": datum.loss_fn_inputs["target_tokens"],
                "weights": TensorData.floats([0.0] * datum.length),
                **{n: t for n, t in datum.loss_fn_inputs.items() if n == "temperature"},
            },
        )
        for datum in payload.data
    )
    config = {n: v for n, v in payload.loss_fn_config.items() if n == "temperature"}
    outputs = backend.forward(A, forward(probe, **config)).outputs
    data: list[Datum] = []
    for datum, output in zip(payload.data, outputs, strict=True):
        near = {
            name: TensorData.floats([lp + rng.gauss(0, 0.3) for lp in output["logprobs"].values()])
            for name in ("logprobs", "ref_log_prob")
            if name in datum.loss_fn_inputs
        }
        data.append(replace(datum, loss_fn_inputs={**datum.loss_fn_inputs, **near}))
    return replace(payload, data=tuple(data))


def operation(
    backend: PeftBackend, loss_fn: LossFn, sequences: list[list[int]], options: Mapping[str, Any], seed: int
) -> ForwardBackward:
    rng = random.Random(seed)
    config: dict[str, float] = {"temperature": 1.3} if options["temperature"] == "operation" else {}
    if loss_fn is not LossFn.CROSS_ENTROPY and options["kl"]:
        config["kl_coef"] = 0.4
    if loss_fn is LossFn.DRO:
        config["beta"] = 0.3
    if loss_fn is LossFn.GSPO or (options["clips"] and loss_fn in (LossFn.PPO, LossFn.CISPO)):
        config |= {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4}
    data = tuple(drawn_datum(rng, tokens, loss_fn, options, [-6.0] * len(tokens)) for tokens in sequences)
    payload = ForwardBackward(data=data, loss_fn=loss_fn, loss_fn_config=config)
    return payload if loss_fn is LossFn.CROSS_ENTROPY else retargeted(backend, payload, rng)


def check(backend: PeftBackend, plain: Plain, payload: ForwardBackward) -> None:
    """Value and gradient are those of the reference."""
    backend.discard_window(A)
    result = backend.forward_backward(A, payload)
    masters = masters_of(backend)
    expected, total = plain.loss(payload, masters, CONFIG.scale)
    theirs = torch.cat([g.flatten() for g in torch.autograd.grad(total, list(masters.values()))])
    ours = gradients(backend, A)
    size = 0.0
    for output, logprobs, datum in zip(result.outputs, expected, payload.data, strict=True):
        assert output["logprobs"].shape == datum.loss_fn_inputs["target_tokens"].shape
        torch.testing.assert_close(to_tensor(output["logprobs"]).double(), logprobs.detach(), rtol=1e-5, atol=3e-5)
        size += float(logprobs.detach().abs().sum())
    assert abs(result.metrics["loss:sum"] - float(total.detach())) <= 1e-5 * max(size, abs(float(total.detach())))
    assert float((ours - theirs).norm()) <= 1e-5 * max(float(theirs.norm()), 0.1)


OPTIONS = st.fixed_dictionaries(
    {
        "k": st.integers(0, 5),
        "weighted": st.booleans(),
        "kl": st.booleans(),
        "clips": st.booleans(),
        "temperature": st.sampled_from(["none", "operation", "datum"]),
    }
)


@given(
    loss_fn=st.sampled_from(list(LossFn)),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    options=OPTIONS,
    seed=st.integers(0, 2**31),
)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_loss_through_the_model_equals_plain_transformers(
    trained_backend: PeftBackend,
    plain: Plain,
    loss_fn: LossFn,
    lengths: list[int],
    options: Mapping[str, Any],
    seed: int,
) -> None:
    rng = random.Random(seed)
    sequences = [rng.choices(range(VOCAB), k=length) for length in lengths]
    check(trained_backend, plain, operation(trained_backend, loss_fn, sequences, options, seed))


@given(
    loss_fn=st.sampled_from(list(LossFn)),
    branches=st.lists(st.tuples(st.integers(0, 80), st.integers(0, 9)), min_size=1, max_size=6),
    options=OPTIONS,
    seed=st.integers(0, 2**31),
)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_datums_that_branch_anywhere_equal_plain_transformers(
    trained_backend: PeftBackend,
    plain: Plain,
    loss_fn: LossFn,
    branches: list[tuple[int, int]],
    options: Mapping[str, Any],
    seed: int,
) -> None:
    """Each datum follows a trunk of 80 tokens for a while; losses lie anywhere, on what is shared as well."""
    rng = random.Random(seed)
    trunk = rng.choices(range(VOCAB), k=80)
    sequences = [trunk[:shared] + rng.choices(range(VOCAB), k=own + (shared == 0)) for shared, own in branches]
    payload = operation(trained_backend, loss_fn, sequences, options, seed)
    check(trained_backend, plain, payload)


SWITCHES = {
    "attn": lora(attn=True, mlp=False),
    "mlp": lora(attn=False, mlp=True),
    "unembed": lora(attn=False, mlp=False, unembed=True),
    "attn-mlp": lora(),
    "attn-unembed": lora(mlp=False, unembed=True),
    "mlp-unembed": lora(attn=False, unembed=True),
    "all": lora(unembed=True),
    "rank-1": lora(rank=1, alpha=1.0, unembed=True),
    "rank-256": lora(rank=256, alpha=64.0, unembed=True),
    "rslora": lora(rank=16, alpha=8.0, unembed=True, rslora=True),
}


@pytest.mark.parametrize("config", SWITCHES.values(), ids=SWITCHES)
def test_gradients_are_the_finite_differences_of_the_loss_for_every_choice_of_layers(
    backend: PeftBackend, config: LoraConfig
) -> None:
    """Along the gradient itself, and along a random direction; embeddings are tied."""
    backend.open(A, config)
    move(backend)
    payload = forward_backward(batch(5, lengths=(12, 7)))
    backend.forward_backward(A, payload)
    gradient = gradients(backend, A)
    generator = torch.Generator().manual_seed(1)
    random_direction = torch.randn(gradient.shape, generator=generator)
    random_direction += gradient / gradient.norm() * random_direction.norm()
    for direction in (gradient, random_direction):
        unit = direction / direction.norm()
        expected = float(gradient.double() @ unit.double())
        step = 0.05 / abs(expected)
        measured = (moved_loss(backend, payload, unit, step) - moved_loss(backend, payload, unit, -step)) / (2 * step)
        assert measured == pytest.approx(expected, rel=3e-3)


def moved_loss(backend: PeftBackend, payload: ForwardBackward, unit: Tensor, step: float) -> float:
    """Return the loss, summed in float64, with the masters moved by ``step`` along ``unit``."""
    masters = list(backend.state(A).weights.values())
    before = [master.detach().clone() for master in masters]
    with torch.no_grad():
        for master, part in zip(masters, unit.split([m.numel() for m in masters]), strict=True):
            master += step * part.view(master.shape).to(master.device)
    outputs = backend.forward(A, forward(payload.data)).outputs
    with torch.no_grad():
        for master, old in zip(masters, before, strict=True):
            master.copy_(old)
    return -sum(
        float((to_tensor(datum.loss_fn_inputs["weights"]).double() * to_tensor(output["logprobs"]).double()).sum())
        for datum, output in zip(payload.data, outputs, strict=True)
    )


POLICY = [LossFn.IMPORTANCE_SAMPLING, LossFn.PPO, LossFn.CISPO, LossFn.DRO, LossFn.GSPO]


@pytest.mark.parametrize("loss_fn", POLICY)
def test_a_loss_computed_by_the_client_trains_like_the_built_in_one_on_equal_logprobs(
    trained_backend: PeftBackend, loss_fn: LossFn
) -> None:
    """Forward, the loss and its slope on the client, then cross_entropy with the negative slope as weights."""
    backend, rng = trained_backend, random.Random(3)
    options = {"k": 0, "weighted": True, "kl": True, "clips": True, "temperature": "none"}
    sequences = [rng.choices(range(VOCAB), k=length) for length in (14, 9, 21)]
    payload = operation(backend, loss_fn, sequences, options, seed=8)
    backend.discard_window(A)
    built_in = backend.forward_backward(A, payload)
    expected = gradients(backend, A)

    bare = tuple(
        replace(
            datum,
            loss_fn_inputs={
                "target_tokens": datum.loss_fn_inputs["target_tokens"],
                "weights": TensorData.floats([0.0] * datum.length),
            },
        )
        for datum in payload.data
    )
    seen = backend.forward(A, forward(bare))
    leaf = torch.cat([to_tensor(output["logprobs"]) for output in seen.outputs]).double().requires_grad_()
    inputs = {
        name: torch.cat([to_tensor(datum.loss_fn_inputs[name]) for datum in payload.data])
        for name in payload.data[0].loss_fn_inputs
        if name != "target_tokens"
    }
    lengths = [datum.length for datum in payload.data]
    (slope,) = torch.autograd.grad(reference(loss_fn, leaf, inputs, payload.loss_fn_config, lengths), leaf)
    surrogate = tuple(
        replace(d, loss_fn_inputs={**d.loss_fn_inputs, "weights": TensorData.floats((-part).tolist())})
        for d, part in zip(bare, slope.split(lengths), strict=True)
    )
    backend.discard_window(A)
    custom = backend.forward_backward(A, forward_backward(surrogate))

    assert seen.outputs == built_in.outputs == custom.outputs
    assert float((gradients(backend, A) - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("sizes", [(1,) * 6, (4, 2)], ids=str)
@pytest.mark.parametrize("loss_fn", list(LossFn))
def test_splitting_a_batch_of_any_loss_accumulates_the_same_gradient(
    trained_backend: PeftBackend, loss_fn: LossFn, sizes: tuple[int, ...]
) -> None:
    backend, rng = trained_backend, random.Random(5)
    options = {"k": 3, "weighted": True, "kl": True, "clips": True, "temperature": "operation"}
    trunk = rng.choices(range(VOCAB), k=70)
    sequences = [trunk + rng.choices(range(VOCAB), k=n) for n in (9, 4, 12)]
    sequences += [rng.choices(range(VOCAB), k=n) for n in (24, 8, 31)]
    payload = operation(backend, loss_fn, sequences, options, seed=9)
    backend.discard_window(A)
    backend.forward_backward(A, payload)
    whole = gradients(backend, A)
    backend.discard_window(A)
    rest = list(payload.data)
    for size in sizes:
        backend.forward_backward(A, replace(payload, data=tuple(rest[:size])))
        rest = rest[size:]

    assert float((gradients(backend, A) - whole).norm() / whole.norm()) < 1e-5


def test_operations_draw_no_random_number_and_wake_no_dropout(base: BaseModel, tmp_path: Path) -> None:
    """A base model whose config asks for dropout computes the bits of the same model without, the plain way."""
    wet = tmp_path / "dropout"
    shutil.copytree(base.path, wet)
    config = json.loads((wet / "config.json").read_text())
    (wet / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    found: list[tuple[Any, Tensor]] = []
    for path in (base.path, wet):
        backend = PeftBackend(tiny_base(path), device=torch.device("cpu"), compute_dtype="float32", lean=False)
        backend.open(A, CONFIG)
        before = torch.get_rng_state()
        outputs = backend.forward_backward(A, forward_backward(batch(1))).outputs
        backend.optim_step(A, OptimStep())
        assert torch.equal(torch.get_rng_state(), before)
        found.append((outputs, weights(backend, A)))

    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
