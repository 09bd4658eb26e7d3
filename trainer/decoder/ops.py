"""Norm, rotary embedding and gate with their backward, in few passes over memory and without dtype round trips.

Rows of the residual stream and of its gradient may be wider (float32) than the compute dtype. What forward rounds, it
rounds once: its roundings move log-probabilities, and with them every importance ratio; backward's hardly matter.
"""

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x_TD: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the normalised rows in ``dtype`` and 1/rms as float32 [T, 1] (last dimension of any shape)."""
    norm = cast(Tensor, torch.linalg.vector_norm(x_TD, dim=-1, keepdim=True, dtype=torch.float32))
    rstd = norm.square_().div_(x_TD.shape[-1]).add_(eps).rsqrt_()
    return apply_rms_norm(x_TD, rstd, weight, dtype), rstd


def apply_rms_norm(x_TD: Tensor, rstd: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the normalised rows again from a saved ``rstd``: the same bits as ``rms_norm``."""
    return torch.mul(x_TD, rstd).mul_(weight).to(dtype)


def rms_norm_backward_(dx_TD: Tensor, dy_TD: Tensor, x_TD: Tensor, rstd: Tensor, weight: Tensor) -> None:
    """Add the gradient of the norm's input to ``dx_TD``."""
    g = torch.mul(dy_TD, weight.to(dx_TD.dtype))
    slope = cast(Tensor, torch.linalg.vecdot(g, x_TD.to(g.dtype))).unsqueeze(-1)
    slope.mul_(rstd).mul_(rstd).mul_(rstd).div_(x_TD.shape[-1])
    dx_TD.addcmul_(g, rstd.to(dx_TD.dtype)).addcmul_(x_TD, slope, value=-1.0)


def rotate_(x_TND: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> None:
    """Rotate heads in place; cos and sin (float32) hold half a head. With ``-sin`` it is its own backward."""
    half = x_TND.shape[-1] // 2
    left, right = x_TND[..., :half].to(cos_T1D.dtype), x_TND[..., half:].to(cos_T1D.dtype)
    turned = torch.mul(left, cos_T1D).addcmul_(right, sin_T1D, value=-1.0)
    x_TND[..., half:] = torch.mul(right, cos_T1D).addcmul_(left, sin_T1D)
    x_TND[..., :half] = turned


def swiglu(gate_up_TF: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` of rows that hold one after the other."""
    gate, up = gate_up_TF.chunk(2, dim=1)
    return F.silu(gate).mul_(up)


def swiglu_backward(dy_TF: Tensor, gate_up_TF: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up, laid out like them, and the forward's value. Overwrites ``dy_TF``."""
    gate, up = gate_up_TF.chunk(2, dim=1)
    grad_TF = torch.empty_like(gate_up_TF)
    d_gate, d_up = grad_TF.chunk(2, dim=1)
    silu = F.silu(gate)
    torch.mul(silu, dy_TF, out=d_up)
    torch.ops.aten.silu_backward.grad_input(dy_TF.mul_(up), gate, grad_input=d_gate)
    return grad_TF, silu.mul_(up)
