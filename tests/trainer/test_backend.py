"""Sessions on one base model: what is computed, and that nobody touches anybody else's state."""

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gateway.core.catalog import BaseModel
from gateway.core.errors import GatewayError, Invalid
from gateway.core.ids import SessionId
from gateway.core.payloads import ForwardBackward, LossFn, OptimStep
from gateway.core.results import ForwardResult
from gateway.core.tensors import Datum, TensorData
from tests.trainer.builders import VOCAB, A, B, batch, forward, forward_backward, lora, policy_batch, tiny_base
from tests.trainer.conftest import make_backend
from tests.trainer.states import gradients, state_of, weights
from trainer.batching import to_tensor
from trainer.peft_backend import PeftBackend

STEP = OptimStep(learning_rate=1e-2)


def logprobs(result: ForwardResult) -> list[float]:
    return [float(value) for output in result.outputs for value in output["logprobs"].values()]


@pytest.mark.parametrize("loss_fn", list(LossFn))
def test_forward_returns_the_bits_of_forward_backward_and_touches_no_gradient(
    backend: PeftBackend, loss_fn: LossFn
) -> None:
    data = batch(1) if loss_fn is LossFn.CROSS_ENTROPY else policy_batch(1)
    config = {"temperature": 0.7}
    if loss_fn is LossFn.GSPO:
        data = masked(data)
        config |= {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    backend.open(A, lora(unembed=True))
    trained(backend, A)
    before = state_of(backend, A)

    plain = backend.forward(A, forward(data, loss_fn, **config))
    unchanged = state_of(backend, A)
    with_gradient = backend.forward_backward(A, forward_backward(data, loss_fn, **config))

    assert plain == with_gradient
    assert unchanged == before
    assert [output["logprobs"].shape for output in plain.outputs] == [(24,), (9,), (17,), (24,)]


def masked(data: tuple[Datum, ...]) -> tuple[Datum, ...]:
    """Add gspo's mask: the positions with an advantage."""
    return tuple(with_input(d, "sequence_ratio_mask", [float(a != 0) for a in given(d, "advantages")]) for d in data)


def given(datum: Datum, name: str) -> list[float]:
    return [float(value) for value in datum.loss_fn_inputs[name].values()]


def with_input(datum: Datum, name: str, values: list[float]) -> Datum:
    return replace(datum, loss_fn_inputs={**datum.loss_fn_inputs, name: TensorData.floats(values)})


def alternatives(seed: int, lengths: tuple[int, ...], k: int) -> tuple[Datum, ...]:
    """Datums with k targets and weights per position, some of the weights zero."""
    rng = random.Random(seed)
    return tuple(
        replace(
            datum,
            loss_fn_inputs={
                "target_tokens": TensorData.ints(
                    [rng.randrange(VOCAB) for _ in range(datum.length * k)], (datum.length, k)
                ),
                "weights": TensorData.floats(
                    [rng.choice([0.0, rng.uniform(-1, 1)]) for _ in range(datum.length * k)], (datum.length, k)
                ),
            },
        )
        for datum in batch(seed, lengths)
    )


def test_alternatives_and_temperatures_give_value_and_gradient_of_plain_peft(
    backend: PeftBackend, base: BaseModel
) -> None:
    """Against transformers with its full logits, LoRA applied by hand to the weights, in float32."""
    backend.open(A, lora(mlp=False))
    trained(backend, A)
    data = (*alternatives(2, (9, 14), 5), *batch(3, (11,)))
    rng = random.Random(4)
    data = (data[0], with_input(data[1], "temperature", [rng.uniform(0.5, 2) for _ in range(14)]), data[2])

    result = backend.forward_backward(A, forward_backward(data, temperature=1.3))

    masters = {name: m.detach().cpu().clone().requires_grad_() for name, m in backend.state(A).weights.items()}
    total = torch.zeros(())
    for datum, output in zip(data, result.outputs, strict=True):
        logits = plain_logits(base, masters, 8.0 / 4, list(datum.model_input.values()))
        temperature = torch.tensor(given(datum, "temperature") if "temperature" in datum.loss_fn_inputs else [1.3])
        targets = to_tensor(datum.loss_fn_inputs["target_tokens"]).reshape(datum.length, -1)
        expected = (logits / temperature[:, None]).log_softmax(-1).gather(1, targets)
        weight = to_tensor(datum.loss_fn_inputs["weights"]).reshape(datum.length, -1)
        total = total - (weight * expected).sum()
        assert output["logprobs"].shape == datum.loss_fn_inputs["target_tokens"].shape
        found = to_tensor(output["logprobs"]).reshape(datum.length, -1)
        torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=2e-5)
    assert result.metrics["loss:sum"] == pytest.approx(float(total.detach()), rel=1e-5)
    theirs = torch.cat([g.flatten() for g in torch.autograd.grad(total, list(masters.values()))])
    assert float((gradients(backend, A) - theirs).norm() / theirs.norm()) < 1e-5


def plain_logits(base: BaseModel, masters: dict[str, torch.Tensor], scale: float, tokens: list[int]) -> torch.Tensor:
    """Return transformers' logits of a model whose weights carry the adapter, differentiable in ``masters``."""
    from torch.func import functional_call
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base.path, dtype=torch.float32).eval().requires_grad_(False)
    changed = {
        f"{path}.weight": model.get_submodule(path).weight
        + scale * masters[f"{path}.lora_B"] @ masters[f"{path}.lora_A"]
        for path in {name.rpartition(".")[0] for name in masters}
    }
    return functional_call(model, changed, (torch.tensor([tokens]),), {"use_cache": False}, tie_weights=False).logits[0]


def test_an_operation_mixing_datums_with_and_without_alternatives_splits_like_any_other(backend: PeftBackend) -> None:
    data = (*alternatives(2, (9, 14), 3), *batch(3, (11, 9)), *alternatives(5, (10,), 1))
    whole, parts = SessionId("sess-whole"), SessionId("sess-parts")
    for session in (whole, parts):
        backend.open(session, lora(unembed=True))
        trained(backend, session)

    together = backend.forward_backward(whole, forward_backward(data))
    alone = [backend.forward_backward(parts, forward_backward((datum,))) for datum in data]

    assert [output["logprobs"].shape for output in together.outputs] == [(9, 3), (14, 3), (11,), (9,), (10, 1)]
    for ours, theirs in zip(together.outputs, alone, strict=True):
        torch.testing.assert_close(
            to_tensor(ours["logprobs"]), to_tensor(theirs.outputs[0]["logprobs"]), rtol=1e-5, atol=1e-5
        )
    expected, found = gradients(backend, whole), gradients(backend, parts)
    assert float((expected - found).norm() / expected.norm()) < 1e-5


def test_the_sequence_ratio_is_that_of_each_datum_whatever_the_micro_batch(
    base: BaseModel, device: torch.device
) -> None:
    data = masked(policy_batch(6))
    clip = {"clip_low_threshold": 0.2, "clip_high_threshold": 3.0}
    found: list[torch.Tensor] = []
    for tokens in (1, 4096):
        backend = make_backend(base, micro_batch_tokens=tokens, device=device)
        backend.open(A, lora())
        backend.forward_backward(A, forward_backward(data, LossFn.GSPO, **clip))
        found.append(gradients(backend, A))

    assert float((found[0] - found[1]).norm() / found[0].norm()) < 1e-5


def test_logprobs_are_those_of_plain_transformers(backend: PeftBackend, base: BaseModel) -> None:
    from transformers import AutoModelForCausalLM

    backend.open(A, lora())
    data = batch(1)

    ours = backend.forward(A, forward(data))

    model = AutoModelForCausalLM.from_pretrained(base.path, dtype=torch.float32).eval()
    for datum, output in zip(data, ours.outputs, strict=True):
        tokens = torch.tensor([list(datum.model_input.values())])
        targets = torch.tensor(list(datum.loss_fn_inputs["target_tokens"].values()))
        with torch.no_grad():
            expected = model(input_ids=tokens).logits[0].log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(list(output["logprobs"].values())), expected, rtol=1e-5, atol=2e-5)


def test_progress_counts_the_datums_of_every_micro_batch(base: BaseModel) -> None:
    backend = make_backend(base, micro_batch_tokens=1)
    backend.open(A, lora())
    noted: list[tuple[int, int]] = []

    backend.forward(A, forward(batch(1)), lambda done, total: noted.append((done, total)))

    assert noted == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_metrics_say_what_was_computed(backend: PeftBackend) -> None:
    backend.open(A, lora())
    data = batch(1)
    result = backend.forward_backward(A, forward_backward(data))
    weights_given = [w for datum in data for w in datum.loss_fn_inputs["weights"].values()]

    assert result.metrics["loss:sum"] == pytest.approx(
        -sum(w * lp for w, lp in zip(weights_given, logprobs(result), strict=True)), rel=1e-5
    )
    assert result.metrics["tokens:sum"] == 74
    assert result.metrics["loss_tokens:sum"] == sum(w != 0 for w in weights_given)
    assert all(name.count(":") == 1 for name in result.metrics)


def test_the_mismatch_with_the_sampler_is_reported_over_trained_positions(backend: PeftBackend) -> None:
    backend.open(A, lora())
    data = policy_batch(1)

    result = backend.forward(A, forward(data, LossFn.IMPORTANCE_SAMPLING))

    old = [q for datum in data for q in datum.loss_fn_inputs["logprobs"].values()]
    advantages = [a for datum in data for a in datum.loss_fn_inputs["advantages"].values()]
    d = [q - lp for q, lp, a in zip(old, logprobs(result), advantages, strict=True) if a != 0]
    assert result.metrics["kl_sample_train_v1:mean"] == pytest.approx(sum(d) / len(d), rel=1e-5)
    assert result.metrics["kl_sample_train_v2:mean"] == pytest.approx(sum(x * x for x in d) / len(d) / 2, rel=1e-5)
    assert result.metrics["ratio_max:max"] == pytest.approx(math.exp(-min(d)), rel=1e-5)
    assert result.metrics["loss_tokens:sum"] == len(d)


@pytest.mark.parametrize("sizes", [(8,), (1,) * 8, (2, 6), (5, 3)])
def test_splitting_a_batch_any_way_accumulates_the_same_gradient(backend: PeftBackend, sizes: tuple[int, ...]) -> None:
    data = policy_batch(3, lengths=(24, 9, 17, 24, 5, 31, 12, 8))
    whole, parts = SessionId("sess-whole"), SessionId("sess-parts")
    for session in (whole, parts):
        backend.open(session, lora(unembed=True))
        trained(backend, session)
    backend.forward_backward(whole, forward_backward(data, LossFn.PPO))

    rest = list(data)
    for size in sizes:
        backend.forward_backward(parts, forward_backward(tuple(rest[:size]), LossFn.PPO))
        rest = rest[size:]

    expected, found = gradients(backend, whole), gradients(backend, parts)
    assert float((expected - found).norm() / expected.norm()) < 1e-5


def test_the_micro_batch_size_does_not_change_the_gradient(base: BaseModel, device: torch.device) -> None:
    found: list[torch.Tensor] = []
    for tokens in (1, 64, 4096):
        backend = make_backend(base, micro_batch_tokens=tokens, device=device)
        backend.open(A, lora())
        backend.forward_backward(A, forward_backward(batch(4)))
        found.append(gradients(backend, A))

    for other in found[1:]:
        assert float((found[0] - other).norm() / found[0].norm()) < 1e-5


def test_neighbours_in_a_micro_batch_do_not_leak(backend: PeftBackend) -> None:
    backend.open(A, lora())
    kept, changed = batch(1, lengths=(16, 16)), batch(2, lengths=(16, 16))

    ours = backend.forward(A, forward((kept[0], kept[1])))
    beside = backend.forward(A, forward((kept[0], changed[1])))

    assert ours.outputs[0] == beside.outputs[0]
    assert ours.outputs[1] != beside.outputs[1]


def test_the_gradient_is_the_finite_difference_of_the_loss(base: BaseModel, device: torch.device) -> None:
    backend = make_backend(base, device=device)
    backend.open(A, lora(unembed=True))
    trained(backend, A)
    payload = forward_backward(batch(5, lengths=(12,)))
    backend.forward_backward(A, payload)
    state = backend.state(A)
    assert state.window is not None
    gradient = dict(zip(state.weights, state.window, strict=True))
    rng = random.Random(0)

    for name, master in backend.state(A).weights.items():
        row, column = rng.randrange(master.shape[0]), rng.randrange(master.shape[1])
        step = 3e-3
        losses: list[float] = []
        for sign in (1, -1):
            with torch.no_grad():
                master[row, column] += sign * step
            losses.append(backend.forward(A, forward(payload.data)).metrics["loss:sum"])
            with torch.no_grad():
                master[row, column] -= sign * step
        measured = (losses[0] - losses[1]) / (2 * step)
        assert float(gradient[name][row, column]) == pytest.approx(measured, rel=2e-2, abs=2e-2), name


ORDERS = [
    order
    for order in itertools.permutations(("fb A", "fb B", "step A", "step B"))
    if order.index("fb A") < order.index("step A") and order.index("fb B") < order.index("step B")
]


@pytest.fixture(scope="module")
def alone(base: BaseModel, device: torch.device) -> dict[SessionId, list[torch.Tensor]]:
    """Each session's tensors after two rounds by itself."""
    found: dict[SessionId, list[torch.Tensor]] = {}
    for session in (A, B):
        backend = make_backend(base, device=device)
        backend.open(session, CONFIGS[session])
        for seed in (1, 2):
            backend.forward_backward(session, PAYLOADS[session](seed))
            backend.optim_step(session, STEP)
        found[session] = state_of(backend, session).tensors
    return found


CONFIGS = {A: lora(unembed=True), B: lora(rank=2, mlp=False, seed=8)}
PAYLOADS = {
    A: lambda seed: forward_backward(batch(seed)),
    B: lambda seed: forward_backward(policy_batch(seed), LossFn.IMPORTANCE_SAMPLING),
}


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_interleaved_sessions_are_bit_equal_to_each_alone(
    base: BaseModel, device: torch.device, alone: dict[SessionId, list[torch.Tensor]], order: tuple[str, ...]
) -> None:
    backend = make_backend(base, device=device)
    for session in (A, B):
        backend.open(session, CONFIGS[session])
    for seed in (1, 2):
        for word in order:
            session = A if word.endswith("A") else B
            if word.startswith("fb"):
                backend.forward_backward(session, PAYLOADS[session](seed))
            else:
                backend.optim_step(session, STEP)

    for session in (A, B):
        for ours, theirs in zip(state_of(backend, session).tensors, alone[session], strict=True):
            assert torch.equal(ours, theirs)


def test_a_fresh_session_depends_on_its_config_alone(
    base: BaseModel, device: torch.device, backend: PeftBackend
) -> None:
    backend.open(B, lora(seed=1))
    trained(backend, B)
    torch.manual_seed(123)
    backend.open(A, lora(seed=7))
    first = weights(backend, A)
    backend.close(A)
    backend.open(A, lora(seed=7))
    other = make_backend(base, device=device)
    other.open(A, lora(seed=7))

    assert torch.equal(first, weights(backend, A))
    assert torch.equal(first, weights(other, A))
    other.open(B, lora(seed=8))
    assert not torch.equal(first, weights(other, B))


@pytest.mark.parametrize(
    ("switches", "expected"),
    [
        ({"attn": True, "mlp": False}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ({"attn": False, "mlp": True}, {"gate_proj", "up_proj", "down_proj"}),
        ({"attn": False, "mlp": False, "unembed": True}, {"lm_head"}),
    ],
    ids=["attn", "mlp", "unembed"],
)
def test_each_switch_trains_its_layers_and_every_tensor_moves(
    backend: PeftBackend, switches: dict[str, bool], expected: set[str]
) -> None:
    backend.open(A, lora(**switches))  # pyright: ignore[reportArgumentType]
    before = {name: master.detach().clone() for name, master in backend.state(A).weights.items()}
    trained(backend, A)

    assert {name.split(".")[-2] for name in before} == expected
    for name, master in backend.state(A).weights.items():
        assert not torch.equal(master, before[name]), name


def test_the_base_stays_bit_equal_whatever_sessions_do(base: BaseModel, device: torch.device, tmp_path: Path) -> None:
    backend = make_backend(base, device=device)
    before = frozen(backend)
    backend.open(A, lora(unembed=True))
    trained(backend, A)
    for n in range(3):
        directory = tmp_path / str(n)
        directory.mkdir()
        backend.write_adapter(A, directory)
        merged = tmp_path / f"merged-{n}"
        merged.mkdir()
        backend.write_merged(A, merged)
    backend.close(A)

    after = frozen(backend)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def frozen(backend: PeftBackend) -> dict[str, torch.Tensor]:
    return {
        name.replace(".base_layer", ""): parameter.detach().clone()
        for name, parameter in backend.model.module.named_parameters()
        if "lora_" not in name
    }


def overflowing(data: tuple[Datum, ...]) -> tuple[Datum, ...]:
    """Make the last datum's ratio infinite at one trained position."""
    last = data[-1]
    old = list(last.loss_fn_inputs["logprobs"].values())
    old[-1] = -1e30
    inputs = {**last.loss_fn_inputs, "logprobs": TensorData.floats(old)}
    return (*data[:-1], replace(last, loss_fn_inputs=inputs))


def heavy(data: tuple[Datum, ...]) -> tuple[Datum, ...]:
    """Weights so large that the loss is finite and its gradient is not."""
    last = data[-1]
    inputs = {**last.loss_fn_inputs, "weights": TensorData.floats([2e37] * last.length)}
    return (*data[:-1], replace(last, loss_fn_inputs=inputs))


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (forward_backward(overflowing(policy_batch(1)), LossFn.IMPORTANCE_SAMPLING), "non_finite_loss"),
        (forward_backward(heavy(batch(1, lengths=(24, 9, 17, 250)))), "non_finite_gradient"),
    ],
    ids=["loss", "gradient"],
)
def test_a_failed_forward_backward_leaves_weights_moments_and_gradient_untouched(
    backend: PeftBackend, payload: ForwardBackward, code: str
) -> None:
    backend.open(A, lora())
    trained(backend, A)
    backend.forward_backward(A, forward_backward(batch(2)))
    before = state_of(backend, A)

    with pytest.raises(GatewayError) as refused:
        backend.forward_backward(A, payload)

    assert refused.value.code == code
    assert state_of(backend, A) == before
    if code == "non_finite_loss":
        assert refused.value.details == {"datum": 3, "position": 23}
    backend.optim_step(A, STEP)


def test_a_step_without_a_gradient_is_refused_and_moves_nothing(backend: PeftBackend) -> None:
    backend.open(A, lora())
    trained(backend, A)
    before = state_of(backend, A)

    with pytest.raises(Invalid) as refused:
        backend.optim_step(A, OptimStep(weight_decay=0.5))

    assert refused.value.code == "empty_window"
    assert state_of(backend, A) == before


def test_a_gradient_of_zeros_is_a_gradient(backend: PeftBackend) -> None:
    backend.open(A, lora())
    (datum,) = batch(1, lengths=(6,))
    zero = replace(datum, loss_fn_inputs={**datum.loss_fn_inputs, "weights": TensorData.floats([0.0] * 6)})
    before = weights(backend, A)

    backend.forward_backward(A, forward_backward((zero,)))
    result = backend.optim_step(A, STEP)

    assert result.optimizer_step == 1
    assert result.metrics["grad_norm:mean"] == 0
    assert torch.equal(weights(backend, A), before)


def test_a_bfloat16_base_keeps_float32_masters_and_learns(model_dir: Path) -> None:
    backend = make_backend(tiny_base(model_dir, dtype="bfloat16"))
    backend.open(A, lora(unembed=True))
    losses: list[float] = []
    for _ in range(8):
        losses.append(backend.forward_backward(A, forward_backward(batch(1))).metrics["loss:sum"])
        backend.optim_step(A, STEP)

    assert losses[-1] < losses[0] / 2
    assert all(tensor.dtype is torch.float32 for tensor in state_of(backend, A).tensors)


def trained(backend: PeftBackend, session: SessionId) -> None:
    """Two steps, so that no tensor is at its initial value."""
    for seed in (11, 12):
        backend.forward_backward(session, forward_backward(batch(seed)))
        backend.optim_step(session, OptimStep(learning_rate=1e-3))
