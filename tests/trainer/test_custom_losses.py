"""Custom losses on the real trainer: the gradient of the graph is that of the function, however it was computed."""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gateway.core.errors import Invalid
from gateway.core.loss_operations import OPERATIONS
from gateway.core.payloads import Forward, ForwardBackward
from gateway.core.tensors import Datum, TensorData
from tests.trainer.builders import VOCAB, A, batch, forward, forward_backward
from tests.trainer.plain import Plain
from tests.trainer.states import gradients, state_of
from tests.trainer.test_reference import CONFIG, masters_of, plain, trained_backend
from tests.trainer.traced import traced
from trainer import graphs
from trainer.batching import to_tensor
from trainer.graphs import Evaluator
from trainer.peft_backend import PeftBackend

__all__ = ["plain", "trained_backend"]

Loss = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]


def clipped(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    ratio = torch.exp(logprobs - old)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    loss = -(surrogate * mask).sum() / mask.sum().clamp(min=1)
    return loss, {"custom/ratio:mean": ratio.mean(), "custom/masked:sum": mask.sum()}


def preferred(logprobs: Tensor, reference: Tensor, beta: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    margin = beta * (logprobs.sum() - reference.sum()) / logprobs.shape[0]
    return -F.logsigmoid(margin), {"custom/margin:mean": margin}


def distilled(logprobs: Tensor, teacher: Tensor, target_tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    gap = F.softplus(F.log_softmax(logprobs, dim=-1) - teacher)[..., 1:]
    seen = target_tokens[:, 0] > 100
    return gap.square().sum() + logprobs[seen].mean(dim=-1).sum(), {"custom/seen:sum": seen.sum()}


RANKS: dict[str, tuple[Loss, dict[str, int]]] = {
    "clipped": (clipped, {"logprobs": 1, "old": 1, "advantages": 1, "mask": 1}),
    "preferred": (preferred, {"logprobs": 1, "reference": 1, "beta": 0}),
    "distilled": (distilled, {"logprobs": 2, "teacher": 2, "target_tokens": 2}),
}


def drawn(ranks: Mapping[str, int], rng: random.Random) -> tuple[Datum, ...]:
    """Datums of three lengths with what a loss of these ranks reads."""
    data: list[Datum] = []
    for length in (13, 30, 7):
        shape = {0: (), 1: (length,), 2: (length, 4)}

        def floats(rank: int, shape: dict[int, tuple[int, ...]] = shape) -> TensorData:
            size = torch.Size(shape[rank]).numel()
            return TensorData.floats([rng.uniform(0.1, 1.0) for _ in range(size)], shape[rank])

        tokens = rng.choices(range(VOCAB), k=length)
        targets = shape[ranks["logprobs"]]
        inputs = {name: floats(rank) for name, rank in ranks.items() if name != "logprobs"}
        inputs["target_tokens"] = TensorData.ints(rng.choices(range(VOCAB), k=torch.Size(targets).numel()), targets)
        data.append(Datum(model_input=TensorData.ints(tokens), loss_fn_inputs=inputs))
    return tuple(data)


def by_the_client(backend: PeftBackend, function: Loss, names: list[str], data: tuple[Datum, ...]) -> ForwardBackward:
    """What a client submits that evaluates ``function`` itself: cross_entropy weighted by the negative slope."""
    bare = [
        replace(d, loss_fn_inputs={"target_tokens": t, "weights": TensorData.floats([0.0] * t.size, t.shape)})
        for d in data
        for t in [d.loss_fn_inputs["target_tokens"]]
    ]
    rows: list[Datum] = []
    for datum, output in zip(bare, backend.forward(A, forward(tuple(bare))).outputs, strict=True):
        given = data[len(rows)].loss_fn_inputs
        leaf = to_tensor(output["logprobs"]).requires_grad_()
        loss, _ = function(leaf, *(to_tensor(given[name]) for name in names))
        (slope,) = torch.autograd.grad(loss, leaf)
        weights = TensorData.floats((-slope).flatten().tolist(), tuple(slope.shape))
        rows.append(replace(datum, loss_fn_inputs={**datum.loss_fn_inputs, "weights": weights}))
    return forward_backward(tuple(rows))


@pytest.mark.parametrize("name", RANKS)
def test_a_graph_trains_like_its_function_on_the_client_and_in_plain_torch(
    trained_backend: PeftBackend, plain: Plain, name: str
) -> None:
    backend, (function, ranks) = trained_backend, RANKS[name]
    names = [each for each in ranks if each != "logprobs"]
    data = drawn(ranks, random.Random(name))
    backend.discard_window(A)
    result = backend.forward_backward(A, ForwardBackward(data=data, loss_fn=traced(function, ranks), loss_fn_config={}))
    ours = gradients(backend, A)

    backend.discard_window(A)
    backend.forward_backward(A, by_the_client(backend, function, names, data))
    client = gradients(backend, A)
    assert float((ours - client).norm() / client.norm()) < 1e-6

    masters = masters_of(backend)
    losses, metrics = [], []
    for datum in data:
        targets = to_tensor(datum.loss_fn_inputs["target_tokens"])
        logits = plain.logits(masters, CONFIG.scale, to_tensor(datum.model_input))
        logprobs = logits.log_softmax(-1).gather(1, targets.reshape(datum.length, -1)).view(targets.shape)
        loss, values = function(logprobs, *(to_tensor(datum.loss_fn_inputs[each]) for each in names))
        losses.append(loss)
        metrics.append({key: float(value.detach()) for key, value in values.items()})
    total = torch.stack(losses).sum()
    theirs = torch.cat([g.flatten() for g in torch.autograd.grad(total, list(masters.values()))])
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5
    assert result.metrics["loss:sum"] == pytest.approx(float(total.detach()), rel=1e-5)
    for key in metrics[0]:
        values = [each[key] for each in metrics]
        reduced = sum(values) / (len(values) if key.endswith(":mean") else 1)
        assert result.metrics[key] == pytest.approx(reduced, rel=1e-5)


def test_a_forward_pass_reports_a_custom_loss_and_leaves_no_gradient(trained_backend: PeftBackend) -> None:
    function, ranks = RANKS["clipped"]
    loss, data = traced(function, ranks), drawn(ranks, random.Random(1))
    trained_backend.discard_window(A)
    before = state_of(trained_backend, A)
    seen = trained_backend.forward(A, Forward(data=data, loss_fn=loss, loss_fn_config={}))
    assert state_of(trained_backend, A) == before
    trained = trained_backend.forward_backward(A, ForwardBackward(data=data, loss_fn=loss, loss_fn_config={}))
    assert seen.outputs == trained.outputs
    assert seen.metrics["loss:sum"] == trained.metrics["loss:sum"]
    assert (seen.metrics["loss_tokens:sum"], trained.metrics["tokens:sum"]) == (0.0, 50.0)


def test_an_input_called_like_a_setting_is_only_what_the_loss_reads(trained_backend: PeftBackend) -> None:
    def scaled(logprobs, temperature, sampler_version):
        return (logprobs * temperature * sampler_version).sum(), {}

    ranks = {"logprobs": 1, "temperature": 0, "sampler_version": 0}
    data = drawn(ranks, random.Random(2))
    result = trained_backend.forward(A, Forward(data=data, loss_fn=traced(scaled, ranks), loss_fn_config={}))
    plain = trained_backend.forward(A, forward(tuple(bare_of(datum) for datum in data)))
    assert result.outputs == plain.outputs


def bare_of(datum: Datum) -> Datum:
    targets = datum.loss_fn_inputs["target_tokens"]
    weights = TensorData.floats([1.0] * targets.size, targets.shape)
    return replace(datum, loss_fn_inputs={"target_tokens": targets, "weights": weights})


def wrong_shape(logprobs: Tensor) -> Any:
    return (logprobs[:3] + logprobs[:4]).sum(), {}


def wide(logprobs: Tensor) -> Any:
    return logprobs.expand(1 << 20, 1 << 20, logprobs.shape[0]).exp().sum(), {}


def wide_product(logprobs: Tensor) -> Any:
    return torch.outer(logprobs.new_ones(1 << 16), logprobs.new_ones(1 << 16)).sum() * logprobs.sum(), {}


def long_range(logprobs: Tensor) -> Any:
    return torch.arange(logprobs.shape[0] * (1 << 28)).sum() * logprobs.sum(), {}


def many_repeats(logprobs: Tensor) -> Any:
    return logprobs.repeat(1 << 30).sum(), {}


def no_number(logprobs: Tensor) -> Any:
    return torch.log(logprobs).sum(), {}


def no_number_measured(logprobs: Tensor) -> Any:
    return logprobs.sum(), {"custom/bad:sum": torch.sqrt(logprobs).sum()}


def no_slope(logprobs: Tensor) -> Any:
    return logprobs.detach().sum(), {}


def steep(logprobs: Tensor) -> Any:
    return torch.sqrt(logprobs * 0).sum(), {}


def no_scalar(logprobs: Tensor) -> Any:
    return logprobs * 2, {}


def huge_number(logprobs: Tensor) -> Any:
    return logprobs.sum() * (logprobs.shape[0] ** 4096), {}


def not_by_python(logprobs: Tensor) -> Any:
    import math

    return logprobs.sum() * math.sqrt(logprobs.sum()), {}


REFUSED = {
    wrong_shape: ("add", "size of tensor"),
    wide: ("expand", "more than 4194304 elements"),
    wide_product: ("outer", "more than 4194304 elements"),
    long_range: ("arange", "more than 4194304 elements"),
    many_repeats: ("repeat", "more than 4194304 elements"),
    no_number: ("log", "not finite"),
    no_number_measured: ("sqrt", "not finite"),
    no_slope: ("sum_1", "no gradient"),
    steep: ("sum_1", "gradient of the loss is not finite at position 0"),
    no_scalar: ("mul", "0-dimensional"),
    huge_number: ("pow_1", "too large"),
    not_by_python: ("sqrt", "functions of math take Python's numbers"),
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_a_loss_that_cannot_be_computed_is_refused_by_node_and_changes_nothing(
    trained_backend: PeftBackend, function: Loss
) -> None:
    node, says = REFUSED[function]
    data = drawn({"logprobs": 1}, random.Random(4))
    trained_backend.discard_window(A)
    trained_backend.forward_backward(A, forward_backward(batch(3)))
    before = state_of(trained_backend, A)
    began = time.process_time()
    with pytest.raises(Invalid, match=says) as refused:
        trained_backend.forward_backward(
            A, ForwardBackward(data=data, loss_fn=traced(function, {"logprobs": 1}), loss_fn_config={})
        )
    assert time.process_time() - began < 5
    assert (refused.value.code, refused.value.details["node"]) == ("bad_loss_graph", node)
    assert f"node {node!r}" in refused.value.message
    assert refused.value.details["datum"] in range(3)
    assert state_of(trained_backend, A) == before


def test_work_is_bounded_for_a_datum_and_for_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    def pairs(logprobs):
        gap = logprobs[:, None] - logprobs[None, :]
        for _ in range(20):
            gap = gap * 1.01
        return gap.sum(), {}

    loss = traced(pairs, {"logprobs": 1})
    with pytest.raises(Invalid, match=f"more than {1 << 24} elements"):
        Evaluator(loss).evaluate([torch.rand(1000)])
    monkeypatch.setattr(graphs, "MAX_WORK", 1 << 20)
    evaluator = Evaluator(loss)
    for _ in range(4):
        evaluator.evaluate([torch.rand(100)])
    with pytest.raises(Invalid, match="send fewer datums"):
        evaluator.evaluate([torch.rand(100)])


def test_a_large_result_is_sketched_first_and_then_computed() -> None:
    def ranked(logprobs):
        gaps = (logprobs[:, None] - logprobs[None, :]).reshape(-1)
        ranks = torch.sort(gaps, descending=True)
        positive = gaps[gaps > 0]
        return (ranks.values[:10] * positive[:10]).sum() + ranks.indices.float().mean(), {}

    values = torch.rand(60)
    assert torch.equal(Evaluator(traced(ranked, {"logprobs": 1})).evaluate([values]).loss, ranked(values)[0])


def test_every_allowed_operation_is_one_of_torch_or_python() -> None:
    assert all(callable(graphs._function(operation)) for operation in OPERATIONS)
    assert not [name for name in OPERATIONS if name.endswith("_") and not name.startswith("operator.")]


def test_what_losses_are_written_with_gives_the_functions_value_and_gradient() -> None:
    def everything(logprobs, old, mask, target_tokens):
        ratio = torch.exp(logprobs - old)
        device = logprobs.device
        parts = [
            torch.where(mask > 0, ratio, 0.0).sum() / mask.sum().clamp(min=1),
            F.huber_loss(logprobs, old, delta=0.5) + F.mse_loss(logprobs, old) + F.smooth_l1_loss(logprobs, old),
            F.softmax(ratio, dim=-1).max(dim=0).values + F.relu(ratio).amax() + torch.sigmoid(logprobs).mean(),
            torch.logsumexp(logprobs, 0) + logprobs[mask > 0].mean() + logprobs[1:][..., -1],
            torch.cumsum(logprobs, 0)[-1] + torch.cat([logprobs, old]).sum() + torch.stack([ratio, old])[0].sum(),
            (torch.arange(logprobs.shape[0], device=device) * logprobs).sum() / math_of(logprobs),
            logprobs.to(torch.float64).square().sum().float() + logprobs.type_as(old).pow(2).sum() ** 0.5,
            logprobs.masked_fill(mask == 0, 0.0).norm() + torch.zeros_like(logprobs).add(logprobs, alpha=2).sum(),
            (logprobs.unsqueeze(-1) @ old.view(1, -1)).tril().sum() + torch.dot(logprobs, old),
            (target_tokens.float() * logprobs).sum().abs() + ((target_tokens % 2 == 0) & (mask > 0)).float().sum(),
        ]
        return torch.stack(parts).sum(), {"custom/ratio:mean": ratio.mean()}

    def math_of(logprobs):
        import math

        return math.sqrt(logprobs.shape[0]) + logprobs.size(0) + logprobs.numel()

    torch.manual_seed(3)
    values = [torch.rand(9), torch.rand(9), (torch.rand(9) > 0.3).float(), torch.randint(0, 9, (9,))]
    ranks = {"logprobs": 1, "old": 1, "mask": 1, "target_tokens": 1}
    leaves = [values[0].clone().requires_grad_() for _ in range(2)]
    ours = Evaluator(traced(everything, ranks)).evaluate([leaves[0], *values[1:]])
    theirs, metrics = everything(leaves[1], *values[1:])
    assert torch.equal(ours.loss, theirs)
    assert ours.metrics == {"custom/ratio:mean": float(metrics["custom/ratio:mean"].detach())}
    slopes = [torch.autograd.grad(loss, leaf)[0] for loss, leaf in zip((ours.loss, theirs), leaves, strict=True)]
    assert torch.equal(*slopes)
