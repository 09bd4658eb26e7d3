"""AdamW against NumPy, and what a step promises."""

import math

import numpy as np
import pytest
import torch

from gateway.core.payloads import OptimStep
from trainer.optim import Moments, global_norm, step


def numpy_adamw(
    w: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, t: int, hyper: OptimStep, ratio: float = 1.0
) -> None:
    """Decoupled weight decay, bias correction by ``t``; in place, float64."""
    rate = hyper.learning_rate * ratio
    w *= 1 - rate * hyper.weight_decay
    m[:] = hyper.beta1 * m + (1 - hyper.beta1) * g
    v[:] = hyper.beta2 * v + (1 - hyper.beta2) * g * g
    corrected_m, corrected_v = m / (1 - hyper.beta1**t), v / (1 - hyper.beta2**t)
    w -= rate * corrected_m / (np.sqrt(corrected_v) + hyper.eps)


def test_fifty_steps_with_changing_hyper_parameters_equal_numpy() -> None:
    rng = np.random.default_rng(3)
    shapes, is_b = [(4, 7), (7, 3), (1, 1)], [False, True, False]
    theirs = [rng.normal(size=shape) for shape in shapes]
    ours = [torch.tensor(w, dtype=torch.float32) for w in theirs]
    moments = Moments.zeros(ours)
    first, second = [np.zeros(s) for s in shapes], [np.zeros(s) for s in shapes]
    for t in range(1, 51):
        hyper = OptimStep(
            learning_rate=1e-3 * (1 + t % 5),
            beta1=0.9 if t % 2 else 0.8,
            beta2=0.95 if t % 3 else 0.99,
            eps=1e-8,
            weight_decay=0.1 * (t % 4),
            grad_clip_norm=0.0 if t % 7 else 2.0,
            lora_plus_lr_ratio=1.0 if t % 3 else 16.0,
        )
        gradients = [rng.normal(size=shape) for shape in shapes]
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients))
        returned = step(ours, [torch.tensor(g, dtype=torch.float32) for g in gradients], moments, hyper, is_b=is_b)
        assert returned == pytest.approx(norm, rel=1e-6)
        scale = min(1.0, hyper.grad_clip_norm / norm) if hyper.grad_clip_norm else 1.0
        for w, g, m, v, b in zip(theirs, gradients, first, second, is_b, strict=True):
            numpy_adamw(w, g * scale, m, v, t, hyper, hyper.lora_plus_lr_ratio if b else 1.0)

    assert moments.step == 50
    for w, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(w.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_a_learning_rate_of_zero_leaves_the_weights_bit_equal() -> None:
    weights = [torch.randn(5, 5)]
    before = weights[0].clone()

    step(weights, [torch.randn(5, 5)], Moments.zeros(weights), OptimStep(learning_rate=0.0, weight_decay=0.5))

    assert torch.equal(weights[0], before)


def test_the_norm_before_clipping_is_returned_and_the_clipped_gradient_is_applied() -> None:
    weights = [torch.zeros(2)]
    moments = Moments.zeros(weights)

    norm = step(weights, [torch.tensor([3.0, 4.0])], moments, OptimStep(beta1=0.0, grad_clip_norm=1.0))

    assert norm == 5.0
    torch.testing.assert_close(moments.first[0], torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    weights = [torch.ones(2), torch.ones(2)]
    moments = Moments.zeros(weights)

    norm = step(weights, [torch.tensor([1.0, bad]), torch.ones(2)], moments, OptimStep())

    assert not math.isfinite(norm)
    assert moments.step == 0
    assert all(torch.equal(w, torch.ones(2)) for w in weights)


def test_the_norm_of_large_gradients_does_not_overflow() -> None:
    assert global_norm([torch.full((4,), 1e30)]) == pytest.approx(2e30, rel=1e-6)
