"""Per-token losses; pure functions.

Suffix P counts the positions of a micro-batch, all datums laid end to end without padding; cross_entropy over
``[N, K]`` targets has K entries per position. Log-probabilities are in nats and float32, at the temperature asked for.
Losses are returned per entry and **summed** by the caller, never averaged, so that accumulating two halves of a batch
equals running it whole; the learning rate carries the scale.

A position is *trained* when its loss can have a gradient: ``weights`` (cross_entropy, dro) or ``weights * advantages``
(other policy losses) is not zero, or the KL term counts there. Other positions add exactly zero, whatever sampler
log-probability they carry. ``weights`` of a policy loss is 1 where it is not given.
"""

import math
from collections.abc import Mapping, Sequence
from typing import assert_never

import torch
from torch import Tensor

from gateway.core.loss_inputs import CLIP_HIGH, CLIP_LOW, DEFAULT_BETA, clip_bounds
from gateway.core.payloads import LossFn


def token_losses(
    loss_fn: LossFn,
    new_logprobs_P: Tensor,
    inputs: Mapping[str, Tensor],
    config: Mapping[str, float],
    lengths: Sequence[int] = (),
) -> Tensor:
    """Return the loss of every position.

    Args:
        new_logprobs_P: under the weights being trained; carries the gradient.
        inputs: the loss's inputs by name, each ``[P]`` float32.
        config: the loss's settings; what is missing has its published default.
        lengths: how many positions each datum has, in order; only gspo looks beyond single positions.
    """
    if loss_fn is LossFn.CROSS_ENTROPY:
        return cross_entropy(new_logprobs_P, inputs["weights"])
    old_P, advantages_P, weights_P = inputs["logprobs"], inputs["advantages"], _weights(inputs)
    low, high = clip_arrays(loss_fn, inputs, config)
    match loss_fn:
        case LossFn.IMPORTANCE_SAMPLING:
            losses_P = importance_sampling(new_logprobs_P, old_P, advantages_P * weights_P)
        case LossFn.PPO:
            losses_P = ppo(new_logprobs_P, old_P, advantages_P, weights_P, low, high)
        case LossFn.CISPO:
            losses_P = cispo(new_logprobs_P, old_P, advantages_P * weights_P, low, high)
        case LossFn.DRO:
            losses_P = dro(new_logprobs_P, old_P, advantages_P, weights_P, config.get("beta", DEFAULT_BETA))
        case LossFn.GSPO:
            mask_P = inputs["sequence_ratio_mask"]
            losses_P = gspo(new_logprobs_P, old_P, advantages_P, weights_P, mask_P, lengths, low, high)
        case _:
            assert_never(loss_fn)
    kl_coef = config.get("kl_coef", 0.0)
    if kl_coef:
        kl_P = reference_kl(new_logprobs_P, inputs["ref_log_prob"], kl_weights(loss_fn, inputs))
        losses_P = losses_P + kl_coef * kl_P
    return losses_P


def trained_positions(loss_fn: LossFn, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """Return a bool ``[P]``: where the loss has weight."""
    if loss_fn in (LossFn.CROSS_ENTROPY, LossFn.DRO):
        return _weights(inputs) != 0
    trained_P = _weights(inputs) * inputs["advantages"] != 0
    return trained_P | (kl_weights(loss_fn, inputs) != 0) if config.get("kl_coef", 0.0) else trained_P


def fills(loss_fn: LossFn, config: Mapping[str, float]) -> Mapping[str, float]:
    """Return what an optional input is where a datum lacks it and another datum of its micro-batch has it."""
    low, high = clip_bounds(loss_fn, config)
    return {
        "weights": 1.0,
        "temperature": config.get("temperature", 1.0),
        "ref_log_prob": math.nan,  # only reported: a loss that uses it needs it in every datum
        CLIP_LOW: low if low is not None else math.nan,
        CLIP_HIGH: high if high is not None else math.nan,
    }


def kl_weights(loss_fn: LossFn, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the weight of the KL term: ``weights``; without them 1 where there is an advantage (dro: everywhere)."""
    if "weights" in inputs or loss_fn is LossFn.DRO:
        return _weights(inputs)
    return (inputs["advantages"] != 0).to(inputs["advantages"].dtype)


def cross_entropy(new_logprobs_P: Tensor, weights_P: Tensor) -> Tensor:
    """Return ``-weight * new``. Weights may be negative or fractional."""
    return -weights_P * torch.where(weights_P != 0, new_logprobs_P, 0.0)


def importance_sampling(new_logprobs_P: Tensor, old_logprobs_P: Tensor, advantages_P: Tensor) -> Tensor:
    """Return ``-exp(new - old) * advantage``; ``old`` is what the sampler reported."""
    return -_ratio(new_logprobs_P, old_logprobs_P, advantages_P != 0) * advantages_P


def ppo(
    new_logprobs_P: Tensor,
    old_logprobs_P: Tensor,
    advantages_P: Tensor,
    weights_P: Tensor,
    low_P: Tensor,
    high_P: Tensor,
) -> Tensor:
    """Return ``-weight * min(r * advantage, clamp(r, low, high) * advantage)`` with ``r = exp(new - old)``."""
    ratio_P = _ratio(new_logprobs_P, old_logprobs_P, advantages_P * weights_P != 0)
    return _clipped(ratio_P, advantages_P, weights_P, low_P, high_P)


def cispo(
    new_logprobs_P: Tensor, old_logprobs_P: Tensor, advantages_P: Tensor, low_P: Tensor, high_P: Tensor
) -> Tensor:
    """Return ``-stop_gradient(clamp(r, low, high)) * new * advantage`` with ``r = exp(new - old)``."""
    trained_P = advantages_P != 0
    ratio_P = _ratio(new_logprobs_P, old_logprobs_P, trained_P).detach().clamp(low_P, high_P)
    return -ratio_P * torch.where(trained_P, new_logprobs_P, 0.0) * advantages_P


def dro(new_logprobs_P: Tensor, old_logprobs_P: Tensor, advantages_P: Tensor, weights_P: Tensor, beta: float) -> Tensor:
    """Return ``-weight * (new * advantage - beta / 2 * (new - old)^2)``; the square counts without an advantage too."""
    trained_P = weights_P != 0
    new_P = torch.where(trained_P, new_logprobs_P, 0.0)
    difference_P = torch.where(trained_P, new_logprobs_P - old_logprobs_P, 0.0)
    return -weights_P * (new_P * advantages_P - 0.5 * beta * difference_P.square())


def gspo(
    new_logprobs_P: Tensor,
    old_logprobs_P: Tensor,
    advantages_P: Tensor,
    weights_P: Tensor,
    mask_P: Tensor,
    lengths: Sequence[int],
    low_P: Tensor,
    high_P: Tensor,
) -> Tensor:
    """Return ppo's loss of ``rho = s * exp(new - stop_gradient(new))``, the token form of the sequence ratio.

    ``s = exp(mean of stop_gradient(new) - old)`` is taken over the datum's positions where ``mask`` is not zero.
    """
    trained_P = advantages_P * weights_P != 0
    frozen_P = new_logprobs_P.detach()
    means_P = _sequence_means(frozen_P.double() - old_logprobs_P.double(), mask_P != 0, lengths)
    exponent_P = means_P.to(new_logprobs_P.dtype) + new_logprobs_P - frozen_P
    ratio_P = torch.where(trained_P, exponent_P, 0.0).exp()
    return _clipped(ratio_P, advantages_P, weights_P, low_P, high_P)


def reference_kl(new_logprobs_P: Tensor, ref_logprobs_P: Tensor, weights_P: Tensor) -> Tensor:
    """Return ``weight * (exp(ref - new) - (ref - new) - 1)``: the k3 estimate of the KL from ``new`` to ``ref``."""
    difference_P = torch.where(weights_P != 0, ref_logprobs_P - new_logprobs_P, 0.0)
    return weights_P * (torch.expm1(difference_P) - difference_P)


def clip_arrays(loss_fn: LossFn, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """Return the ratio's bounds: per position where given as inputs, else of the config, else the defaults.

    0-d tensors where one bound holds for all positions; meaningless for losses that clip nothing.
    """
    low, high = clip_bounds(loss_fn, config)
    like = inputs["advantages"]
    return (
        inputs.get(CLIP_LOW, like.new_tensor(0.0 if low is None else low)),
        inputs.get(CLIP_HIGH, like.new_tensor(math.inf if high is None else high)),
    )


def _clipped(ratio_P: Tensor, advantages_P: Tensor, weights_P: Tensor, low_P: Tensor, high_P: Tensor) -> Tensor:
    return -weights_P * torch.minimum(ratio_P * advantages_P, ratio_P.clamp(low_P, high_P) * advantages_P)


def _ratio(new_logprobs_P: Tensor, old_logprobs_P: Tensor, trained_P: Tensor) -> Tensor:
    """Return ``exp(new - old)``, and exactly 1 where nothing is trained: a sentinel there cannot make an infinity."""
    return torch.where(trained_P, new_logprobs_P - old_logprobs_P, 0.0).exp()


def _sequence_means(values_P: Tensor, mask_P: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return each datum's mean over its masked positions, at all of its positions; 0 when it has none."""
    parts: list[Tensor] = []
    sizes = list(lengths)
    for values, mask in zip(torch.split(values_P, sizes), torch.split(mask_P, sizes), strict=True):
        mean = torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)
        parts.append(mean.expand(values.shape[0]))
    return torch.cat(parts)


def _weights(inputs: Mapping[str, Tensor]) -> Tensor:
    weights_P = inputs.get("weights")
    return torch.ones_like(inputs["advantages"]) if weights_P is None else weights_P
