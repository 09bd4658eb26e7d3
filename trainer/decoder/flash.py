"""Attention blocks through torch's fused CPU kernel; the shared prefix joins by its log-sum-exp.

A sibling's queries meet their own keys (causal) and the prefix (not causal) in two calls. Outputs are weighted by their
shares of the total; backward runs both calls with the total output and log-sum-exp, which makes each of them exact.
Suffixes as in ``attention``; H query heads.
"""

import torch
from torch import Tensor

from trainer.decoder.rows import BlockGradients, DeviceBlock, Heads


def forward(
    rows: Tensor, values: Tensor, qk_TE: Tensor, v_TE: Tensor, block: DeviceBlock, heads: Heads
) -> tuple[Tensor, Tensor]:
    """Return the output [F*S*L, H*D] of a block's gathered rows, and its log-sum-exp [F*S*L, H]."""
    own = _own(rows, values, block, heads)
    out, lse = _kernel(*own, causal=True, bias=None, heads=heads)
    out_RHD, lse_RH = _flat(out), lse.transpose(1, 2).reshape(-1, heads.query)
    if block.shape[3]:
        before = _before(rows, qk_TE, v_TE, block, heads)
        out, lse = _kernel(*before, causal=False, bias=_bias(block), heads=heads)
        prefix_RHD, prefix_RH = _flat(out), lse.transpose(1, 2).reshape(-1, heads.query)
        total_RH = torch.logaddexp(lse_RH, prefix_RH)
        share = torch.exp(lse_RH - total_RH).to(rows.dtype)[..., None]
        prefix_share = torch.exp(prefix_RH - total_RH).to(rows.dtype)[..., None]
        out_RHD = torch.mul(out_RHD, share).addcmul_(prefix_RHD, prefix_share)
        lse_RH = total_RH
    return out_RHD.reshape(rows.shape[0], -1), lse_RH


def backward(
    dout: Tensor,
    out: Tensor,
    lse_RH: Tensor,
    rows: Tensor,
    values: Tensor,
    qk_TE: Tensor,
    v_TE: Tensor,
    block: DeviceBlock,
    heads: Heads,
) -> BlockGradients:
    """Return the gradients of a block, given those of its output (zero on padding)."""
    own = _own(rows, values, block, heads)
    grads = _kernel_backward(dout, out, lse_RH, *own, causal=True, bias=None, heads=heads)
    dq, dk, dv = (_flat(g) for g in grads)
    dpk = dpv = None
    if block.shape[3]:
        before = _before(rows, qk_TE, v_TE, block, heads)
        grads = _kernel_backward(dout, out, lse_RH, *before, causal=False, bias=_bias(block), heads=heads)
        more, dpk, dpv = (_flat(g) for g in grads)
        dq = dq + more
        dpk, dpv = dpk.flatten(1), dpv.flatten(1)
    return BlockGradients(q=dq.flatten(1), k=dk.flatten(1), v=dv.flatten(1), pk=dpk, pv=dpv)


def _own(rows: Tensor, values: Tensor, block: DeviceBlock, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of q, k and v as [F*S, heads, L, D]."""
    families, siblings, length, _ = block.shape
    split = heads.query * heads.size
    parts = (rows[:, :split], rows[:, split:], values)
    q, k, v = (part.view(families * siblings, length, -1, heads.size).transpose(1, 2) for part in parts)
    return q, k, v


def _before(
    rows: Tensor, qk_TE: Tensor, v_TE: Tensor, block: DeviceBlock, heads: Heads
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q as [F, heads, S*L, D] and the prefix's k and v as [F, heads, P, D]."""
    families, siblings, length, prefix = block.shape
    split = heads.query * heads.size
    q = rows[:, :split].view(families, siblings * length, -1, heads.size).transpose(1, 2)
    pk, pv = qk_TE[:, split:].index_select(0, block.prefix), v_TE.index_select(0, block.prefix)
    k, v = (part.view(families, prefix, -1, heads.size).transpose(1, 2) for part in (pk, pv))
    return q, k, v


def _bias(block: DeviceBlock) -> Tensor | None:
    if block.prefix_bias is None:
        return None
    families, siblings, length, prefix = block.shape
    return block.prefix_bias[:, None].expand(families, 1, siblings * length, prefix)


def _kernel(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, bias: Tensor | None, heads: Heads
) -> tuple[Tensor, Tensor]:
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attend(q, k, v, 0.0, causal, attn_mask=bias, scale=heads.scale)


def _kernel_backward(
    dout: Tensor,
    out: Tensor,
    lse_RH: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    bias: Tensor | None,
    heads: Heads,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (q.shape[0], q.shape[2])
    wide = (*shape, heads.query, heads.size)
    grad = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    do, o = dout.view(wide).transpose(1, 2), out.view(wide).transpose(1, 2)
    lse = lse_RH.view(*shape, heads.query).transpose(1, 2)
    return grad(do, q, k, v, o, lse, 0.0, causal, attn_mask=bias, scale=heads.scale)


def _flat(x: Tensor) -> Tensor:
    """Return [B, heads, N, D] as rows [B*N, heads, D]."""
    return x.transpose(1, 2).flatten(0, 1)
