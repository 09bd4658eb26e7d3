"""AdamW on one session's LoRA tensors.

State belongs to the session and every hyper-parameter to the call, so nothing of one tenant's step can touch another's.
Masters, gradients and moments are float32.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from gateway.core.payloads import OptimStep
from trainer import many


@dataclass(slots=True, kw_only=True)
class Moments:
    """First and second moments, parallel to the session's parameters, and the number of steps taken."""

    first: list[Tensor]
    second: list[Tensor]
    step: int

    @classmethod
    def zeros(cls, parameters: Sequence[Tensor]) -> "Moments":
        return cls(
            first=[torch.zeros_like(parameter, requires_grad=False) for parameter in parameters],
            second=[torch.zeros_like(parameter, requires_grad=False) for parameter in parameters],
            step=0,
        )


def global_norm(gradients: Sequence[Tensor]) -> float:
    """Return the L2 norm over all tensors together, summed in float64; inf or nan when a gradient is."""
    if not gradients:
        return 0.0
    return float(torch.stack(many.norms(gradients, torch.float64)).square().sum().sqrt())


@torch.no_grad()
def step(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    moments: Moments,
    hyper: OptimStep,
    *,
    is_b: Sequence[bool] = (),
) -> float:
    """Take one step in place and return the gradient norm before clipping.

    Clipping scales all gradients (in place) by ``grad_clip_norm / norm`` when the norm is above it; 0 clips nothing.
    Then, with ``t`` the session's own step count after this step::

        w *= 1 - lr * weight_decay
        m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g * g
        w -= lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    A norm that is not finite is returned and nothing else happens.

    Args:
        is_b: which parameters are LoRA B matrices: their ``lr``, decay included, is times ``lora_plus_lr_ratio``.
    """
    norm = global_norm(gradients)
    if not math.isfinite(norm):
        return norm
    if 0 < hyper.grad_clip_norm < norm:
        many.scale_(gradients, hyper.grad_clip_norm / norm)
    if hyper.lora_plus_lr_ratio == 1.0:
        _adamw(range(len(parameters)), parameters, gradients, moments, hyper, hyper.learning_rate)
    else:
        fast = hyper.learning_rate * hyper.lora_plus_lr_ratio
        for rate, side in ((hyper.learning_rate, False), (fast, True)):
            chosen = [index for index, b in enumerate(is_b) if b is side]
            _adamw(chosen, parameters, gradients, moments, hyper, rate)
    moments.step += 1
    return norm


def _adamw(
    chosen: Sequence[int],
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    moments: Moments,
    hyper: OptimStep,
    learning_rate: float,
) -> None:
    """Step the ``chosen`` parameters in one fused call."""
    if not chosen:
        return
    taken = torch.tensor(float(moments.step), device=parameters[0].device)
    adamw(
        [parameters[index] for index in chosen],
        [gradients[index] for index in chosen],
        [moments.first[index] for index in chosen],
        [moments.second[index] for index in chosen],
        [],
        [taken.clone() for _ in chosen],
        fused=True,
        amsgrad=False,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        lr=learning_rate,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
        maximize=False,
    )
