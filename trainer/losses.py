"""Per-token losses; pure functions.

Suffix P counts the positions of a micro-batch, all datums laid end to end without padding. Log-probabilities are in
nats and float32. Losses are returned per position and **summed** by the caller, never averaged, so that accumulating
two halves of a batch equals running it whole; the learning rate carries the scale.

A position is *trained* when its loss can have a gradient: ``weights`` (cross_entropy) or ``weights * advantages``
(policy losses) is not zero. Other positions add exactly zero, whatever sampler log-probability they carry.
"""

from collections.abc import Mapping
from typing import assert_never

import torch
from torch import Tensor

from gateway.core.payloads import LossFn

PPO_CLIP = (0.8, 1.2)
CISPO_CLIP = (0.0, 4.0)  # one-sided: the ratio is only bounded from above


def token_losses(
    loss_fn: LossFn, new_logprobs_P: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]
) -> Tensor:
    """Return the loss of every position.

    Args:
        new_logprobs_P: under the weights being trained; carries the gradient.
        inputs: the loss's inputs by name, each ``[P]`` float32.
        config: ``clip_low_threshold`` and ``clip_high_threshold``, absolute bounds of the ratio, for ppo and cispo.
    """
    match loss_fn:
        case LossFn.CROSS_ENTROPY:
            return cross_entropy(new_logprobs_P, inputs["weights"])
        case LossFn.IMPORTANCE_SAMPLING:
            return importance_sampling(new_logprobs_P, inputs["logprobs"], policy_weights(inputs))
        case LossFn.PPO:
            low, high = _clip(config, PPO_CLIP)
            return ppo(new_logprobs_P, inputs["logprobs"], inputs["advantages"], _weights(inputs), low, high)
        case LossFn.CISPO:
            low, high = _clip(config, CISPO_CLIP)
            return cispo(new_logprobs_P, inputs["logprobs"], policy_weights(inputs), low, high)
        case _:
            assert_never(loss_fn)


def trained_positions(loss_fn: LossFn, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return a bool ``[P]``: where the loss has weight."""
    match loss_fn:
        case LossFn.CROSS_ENTROPY:
            return inputs["weights"] != 0
        case LossFn.IMPORTANCE_SAMPLING | LossFn.PPO | LossFn.CISPO:
            return policy_weights(inputs) != 0
        case _:
            assert_never(loss_fn)


def policy_weights(inputs: Mapping[str, Tensor]) -> Tensor:
    """Return advantage times the optional weight of each position."""
    weights_P = inputs.get("weights")
    return inputs["advantages"] if weights_P is None else inputs["advantages"] * weights_P


def cross_entropy(new_logprobs_P: Tensor, weights_P: Tensor) -> Tensor:
    """Return ``-weight * new``. Weights may be negative or fractional."""
    return -weights_P * torch.where(weights_P != 0, new_logprobs_P, 0.0)


def importance_sampling(new_logprobs_P: Tensor, old_logprobs_P: Tensor, advantages_P: Tensor) -> Tensor:
    """Return ``-exp(new - old) * advantage``; ``old`` is what the sampler reported."""
    return -_ratio(new_logprobs_P, old_logprobs_P, advantages_P != 0) * advantages_P


def ppo(
    new_logprobs_P: Tensor, old_logprobs_P: Tensor, advantages_P: Tensor, weights_P: Tensor, low: float, high: float
) -> Tensor:
    """Return ``-weight * min(r * advantage, clamp(r, low, high) * advantage)`` with ``r = exp(new - old)``."""
    ratio_P = _ratio(new_logprobs_P, old_logprobs_P, advantages_P * weights_P != 0)
    return -weights_P * torch.minimum(ratio_P * advantages_P, ratio_P.clamp(low, high) * advantages_P)


def cispo(new_logprobs_P: Tensor, old_logprobs_P: Tensor, advantages_P: Tensor, low: float, high: float) -> Tensor:
    """Return ``-stop_gradient(clamp(r, low, high)) * new * advantage`` with ``r = exp(new - old)``."""
    trained_P = advantages_P != 0
    ratio_P = _ratio(new_logprobs_P, old_logprobs_P, trained_P).detach().clamp(low, high)
    return -ratio_P * torch.where(trained_P, new_logprobs_P, 0.0) * advantages_P


def _ratio(new_logprobs_P: Tensor, old_logprobs_P: Tensor, trained_P: Tensor) -> Tensor:
    """Return ``exp(new - old)``, and exactly 1 where nothing is trained: a sentinel there cannot make an infinity."""
    return torch.where(trained_P, new_logprobs_P - old_logprobs_P, 0.0).exp()


def _weights(inputs: Mapping[str, Tensor]) -> Tensor:
    weights_P = inputs.get("weights")
    return torch.ones_like(inputs["advantages"]) if weights_P is None else weights_P


def _clip(config: Mapping[str, float], defaults: tuple[float, float]) -> tuple[float, float]:
    return config.get("clip_low_threshold", defaults[0]), config.get("clip_high_threshold", defaults[1])
