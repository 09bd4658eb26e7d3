"""Every loss against an independent plain-torch reference, and the properties users lean on."""

import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gateway.core.payloads import LossFn
from trainer.losses import token_losses, trained_positions

F64 = torch.float64


def reference(loss_fn: LossFn, lp: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """One position at a time, from the formulas, in float64."""
    total = torch.zeros((), dtype=F64)
    weights = inputs.get("weights")
    for t in range(lp.numel()):
        weight = 1.0 if weights is None else float(weights[t])
        if loss_fn is LossFn.CROSS_ENTROPY:
            total = total - weight * lp[t]
            continue
        advantage = float(inputs["advantages"][t])
        ratio = torch.exp(lp[t] - float(inputs["logprobs"][t]))
        if loss_fn is LossFn.IMPORTANCE_SAMPLING:
            total = total - weight * ratio * advantage
        elif loss_fn is LossFn.PPO:
            low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
            clipped = torch.clamp(ratio, low, high)
            total = total - weight * torch.min(ratio * advantage, clipped * advantage)
        else:
            low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 4.0)
            total = total - weight * torch.clamp(ratio, low, high).detach() * lp[t] * advantage
    return total


@given(
    loss_fn=st.sampled_from(list(LossFn)),
    positions=st.integers(1, 40),
    seed=st.integers(0, 2**31),
    weighted=st.booleans(),
    clip=st.none() | st.tuples(st.floats(0.0, 1.0), st.floats(1.0, 5.0)),
)
@settings(max_examples=150, deadline=None)
def test_value_and_gradient_equal_the_formula(
    loss_fn: LossFn, positions: int, seed: int, weighted: bool, clip: tuple[float, float] | None
) -> None:
    generator = torch.Generator().manual_seed(seed)
    lp = -5 * torch.rand(positions, generator=generator)
    inputs = {
        "logprobs": lp + 0.7 * torch.randn(positions, generator=generator),
        "advantages": torch.randn(positions, generator=generator) * (torch.rand(positions, generator=generator) > 0.3),
    }
    if weighted or loss_fn is LossFn.CROSS_ENTROPY:
        inputs["weights"] = torch.randn(positions, generator=generator)
    has_clip = clip is not None and loss_fn in (LossFn.PPO, LossFn.CISPO)
    config = {"clip_low_threshold": clip[0], "clip_high_threshold": clip[1]} if clip is not None and has_clip else {}
    ours_lp, their_lp = lp.clone().requires_grad_(), lp.to(F64).requires_grad_()

    ours = token_losses(loss_fn, ours_lp, inputs, config).sum()
    theirs = reference(loss_fn, their_lp, inputs, config)
    ours.backward()
    theirs.backward()

    scale = max(1.0, float(theirs.detach().abs()), positions)
    assert float((ours.detach().double() - theirs.detach()).abs()) <= 1e-6 * scale
    assert ours_lp.grad is not None
    assert their_lp.grad is not None
    torch.testing.assert_close(ours_lp.grad.double(), their_lp.grad, rtol=1e-5, atol=1e-6)


def test_on_policy_the_gradient_is_the_negative_advantage() -> None:
    lp = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    advantages = torch.tensor([0.5, -1.0, 2.0])
    inputs = {"logprobs": lp.detach().clone(), "advantages": advantages}
    for loss_fn in (LossFn.IMPORTANCE_SAMPLING, LossFn.PPO, LossFn.CISPO):
        (grad,) = torch.autograd.grad(token_losses(loss_fn, lp, inputs, {}).sum(), lp)
        assert torch.equal(grad, -advantages)


@pytest.mark.parametrize("loss_fn", [LossFn.IMPORTANCE_SAMPLING, LossFn.PPO, LossFn.CISPO])
def test_a_position_without_advantage_costs_nothing_whatever_its_sampler_logprob(loss_fn: LossFn) -> None:
    lp = torch.tensor([-1.0, -2.0], requires_grad=True)
    inputs = {"logprobs": torch.tensor([-9999.0, -2.0]), "advantages": torch.tensor([0.0, 1.0])}

    losses = token_losses(loss_fn, lp, inputs, {})
    losses.sum().backward()

    assert float(losses[0].detach()) == 0
    assert lp.grad is not None
    assert lp.grad.tolist() == [0.0, -1.0]


def test_published_clip_defaults_are_used() -> None:
    lp = torch.tensor([0.0, 0.0])
    inputs = {"logprobs": torch.tensor([-math.log(8.0), math.log(8.0)]), "advantages": torch.tensor([1.0, -1.0])}

    ppo = token_losses(LossFn.PPO, lp, inputs, {})
    cispo = token_losses(
        LossFn.CISPO, torch.tensor([-1.0, -1.0]), {**inputs, "logprobs": torch.tensor([-4.0, 2.0])}, {}
    )

    torch.testing.assert_close(ppo, torch.tensor([-1.2, 0.8]))
    torch.testing.assert_close(cispo, torch.tensor([4.0, -math.exp(-3.0)]))


def test_trained_positions_are_those_with_weight() -> None:
    weights, advantages = torch.tensor([0.0, -0.5, 1.0]), torch.tensor([1.0, 1.0, 0.0])

    assert trained_positions(LossFn.CROSS_ENTROPY, {"weights": weights}).tolist() == [False, True, True]
    inputs = {"weights": weights, "advantages": advantages}
    assert trained_positions(LossFn.PPO, inputs).tolist() == [False, True, False]
