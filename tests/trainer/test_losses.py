"""Every loss against an independent plain-torch reference, and the properties users lean on."""

import math
from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gateway.core.payloads import LossFn
from trainer.losses import token_losses, trained_positions

F64 = torch.float64


def reference(
    loss_fn: LossFn, lp: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float], lengths: Sequence[int]
) -> Tensor:
    """One position at a time, from the published formulas, in float64."""
    total = torch.zeros((), dtype=F64)
    defaults = (0.0, 4.0) if loss_fn is LossFn.CISPO else (0.8, 1.2)
    log_s = [
        mean
        for length, mean in zip(lengths, sequence_means(lp.detach(), inputs, lengths), strict=True)
        for _ in range(length)
    ]
    for t in range(lp.numel()):
        weight = float(inputs["weights"][t]) if "weights" in inputs else 1.0
        if loss_fn is LossFn.CROSS_ENTROPY:
            total = total - weight * lp[t]
            continue
        advantage, old = float(inputs["advantages"][t]), float(inputs["logprobs"][t])
        ratio = torch.exp(lp[t] - old)
        low, high = (
            float(inputs[name][t]) if name in inputs else config.get(name, default)
            for name, default in zip(("clip_low_threshold", "clip_high_threshold"), defaults, strict=True)
        )
        match loss_fn:
            case LossFn.IMPORTANCE_SAMPLING:
                loss = -ratio * advantage
            case LossFn.PPO:
                loss = -torch.min(ratio * advantage, torch.clamp(ratio, low, high) * advantage)
            case LossFn.CISPO:
                loss = -torch.clamp(ratio, low, high).detach() * lp[t] * advantage
            case LossFn.DRO:
                loss = -(lp[t] * advantage - 0.5 * config.get("beta", 0.05) * (lp[t] - old) ** 2)
            case LossFn.GSPO:
                rho = torch.exp(log_s[t] + lp[t] - lp[t].detach())
                loss = -torch.min(rho * advantage, torch.clamp(rho, low, high) * advantage)
        if "kl_coef" in config:
            counts = weight if "weights" in inputs or loss_fn is LossFn.DRO else float(advantage != 0)
            gap = float(inputs["ref_log_prob"][t]) - lp[t]
            total = total + config["kl_coef"] * counts * (torch.exp(gap) - gap - 1)
        total = total + weight * loss
    return total


def sequence_means(lp: Tensor, inputs: Mapping[str, Tensor], lengths: Sequence[int]) -> list[float]:
    """The mean of ``lp - q`` over each datum's masked positions."""
    means: list[float] = []
    start = 0
    for length in lengths:
        masked = "sequence_ratio_mask" in inputs
        at = [t for t in range(start, start + length) if masked and inputs["sequence_ratio_mask"][t] != 0]
        means.append(sum(float(lp[t]) - float(inputs["logprobs"][t]) for t in at) / max(len(at), 1))
        start += length
    return means


CLIPPED = (LossFn.PPO, LossFn.CISPO, LossFn.GSPO)


@given(
    loss_fn=st.sampled_from(list(LossFn)),
    lengths=st.lists(st.integers(1, 15), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
    weighted=st.booleans(),
    clip=st.none() | st.tuples(st.floats(0.0, 1.0), st.floats(1.0, 5.0)),
    clip_inputs=st.sets(st.sampled_from(["clip_low_threshold", "clip_high_threshold"])),
    kl_coef=st.none() | st.floats(0.01, 2.0),
    beta=st.none() | st.floats(0.0, 1.0),
)
@settings(max_examples=300, deadline=None)
def test_value_and_gradient_equal_the_formula(
    loss_fn: LossFn,
    lengths: list[int],
    seed: int,
    weighted: bool,
    clip: tuple[float, float] | None,
    clip_inputs: set[str],
    kl_coef: float | None,
    beta: float | None,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    positions = sum(lengths)

    def normal() -> Tensor:
        return torch.randn(positions, generator=generator)

    def uniform() -> Tensor:
        return torch.rand(positions, generator=generator)

    lp = -5 * uniform()
    inputs: dict[str, Tensor] = {}
    config: dict[str, float] = {}
    if weighted or loss_fn is LossFn.CROSS_ENTROPY:
        inputs["weights"] = normal() * (uniform() > 0.2)
    if loss_fn is not LossFn.CROSS_ENTROPY:
        inputs |= {"logprobs": lp + 0.7 * normal(), "advantages": normal() * (uniform() > 0.3)}
        inputs |= {"sequence_ratio_mask": (uniform() > 0.3).float(), "ref_log_prob": lp + 0.7 * normal()}
        config |= {} if kl_coef is None else {"kl_coef": kl_coef}
    if loss_fn is LossFn.DRO and beta is not None:
        config["beta"] = beta
    if loss_fn in CLIPPED:
        clip = (0.8, 1.2) if clip is None and loss_fn is LossFn.GSPO else clip
        config |= {} if clip is None else {"clip_low_threshold": clip[0], "clip_high_threshold": clip[1]}
        inputs |= {name: uniform() + ("high" in name) for name in sorted(clip_inputs)}
    ours_lp, their_lp = lp.clone().requires_grad_(), lp.to(F64).requires_grad_()

    ours = token_losses(loss_fn, ours_lp, inputs, config, lengths).sum()
    theirs = reference(loss_fn, their_lp, inputs, config, lengths)
    ours.backward()
    theirs.backward()

    scale = max(1.0, float(theirs.detach().abs()), positions)
    assert float((ours.detach().double() - theirs.detach()).abs()) <= 1e-6 * scale
    assert ours_lp.grad is not None
    assert their_lp.grad is not None
    torch.testing.assert_close(ours_lp.grad.double(), their_lp.grad, rtol=1e-5, atol=2e-6)


POLICY = [loss_fn for loss_fn in LossFn if loss_fn is not LossFn.CROSS_ENTROPY]
GSPO_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


@pytest.mark.parametrize("loss_fn", POLICY)
def test_on_policy_the_gradient_is_the_negative_advantage(loss_fn: LossFn) -> None:
    lp = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    advantages = torch.tensor([0.5, -1.0, 2.0])
    inputs = {"logprobs": lp.detach().clone(), "advantages": advantages, "sequence_ratio_mask": torch.ones(3)}
    config = GSPO_CLIP if loss_fn is LossFn.GSPO else {}

    (grad,) = torch.autograd.grad(token_losses(loss_fn, lp, inputs, config, [3]).sum(), lp)

    assert torch.equal(grad, -advantages)


@pytest.mark.parametrize("loss_fn", POLICY)
def test_a_position_without_weight_costs_nothing_whatever_its_sampler_logprob(loss_fn: LossFn) -> None:
    lp = torch.tensor([-1.0, -2.0], requires_grad=True)
    inputs = {
        "logprobs": torch.tensor([-9999.0, -2.0]),
        "ref_log_prob": torch.tensor([-9999.0, -2.0]),
        "advantages": torch.tensor([0.0, 1.0]),
        "weights": torch.tensor([0.0, 1.0]),
        "sequence_ratio_mask": torch.tensor([0.0, 1.0]),
    }
    config = {"kl_coef": 0.5, **(GSPO_CLIP if loss_fn is LossFn.GSPO else {})}

    losses = token_losses(loss_fn, lp, inputs, config, [2])
    losses.sum().backward()

    assert float(losses[0].detach()) == 0
    assert lp.grad is not None
    assert lp.grad.tolist() == [0.0, -1.0]


def test_the_ratio_of_a_sequence_does_not_see_its_neighbours() -> None:
    lp = torch.tensor([-1.0, -2.0, -3.0])
    inputs = {
        "logprobs": torch.tensor([-1.1, -9.0, -2.9]),
        "advantages": torch.ones(3),
        "sequence_ratio_mask": torch.tensor([1.0, 0.0, 0.5]),
    }

    losses = token_losses(LossFn.GSPO, lp, inputs, {**GSPO_CLIP}, [2, 1])

    torch.testing.assert_close(losses, -torch.exp(torch.tensor([0.1, 0.1, -0.1])))


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
    inputs = {"weights": weights, "advantages": advantages}

    assert trained_positions(LossFn.CROSS_ENTROPY, {"weights": weights}, {}).tolist() == [False, True, True]
    assert trained_positions(LossFn.PPO, inputs, {}).tolist() == [False, True, False]
    assert trained_positions(LossFn.PPO, inputs, {"kl_coef": 0.1}).tolist() == [False, True, True]
    assert trained_positions(LossFn.PPO, {"advantages": advantages}, {"kl_coef": 0.1}).tolist() == [True, True, False]
    assert trained_positions(LossFn.DRO, {"advantages": advantages}, {}).tolist() == [True, True, True]
