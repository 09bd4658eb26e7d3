"""Causal attention over a micro-batch's blocks: matmul and softmax here, or ``flash`` where that is faster.

Suffixes: F families, S siblings, L own length, P prefix length, K key/value heads, G query heads per key/value head,
D head size. All products run over contiguous copies of a block's rows; queries lie as [F, K, S, G, L, D], so that one
view of them meets the shared prefix ([F * K, S * G * L, D]) and another the sibling's own keys ([F * K * S, G * L, D]).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.decoder import flash
from trainer.decoder.rows import BlockGradients, DeviceBlock, Heads, gather, scatter

_CHUNK = 256  # queries of a sibling computed at once; bounds memory, and saves most of the hidden cells
_KEEP_KEYS = 256  # with at most so many keys the probabilities are kept for backward, else recomputed


@dataclass(slots=True)
class _Operands:
    """Contiguous copies: ``q`` is scaled; ``pk`` and ``pv`` are empty without a prefix."""

    q: Tensor  # [F, K, S, G, L, D]
    k: Tensor  # [F * K * S, L, D]
    v: Tensor
    pk: Tensor  # [F * K, P, D]
    pv: Tensor


def forward(
    qk_TE: Tensor, v_TE: Tensor, blocks: Sequence[DeviceBlock], heads: Heads, *, keep: bool
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the attention output [T, heads * D] and, with ``keep``, what each block keeps for backward."""
    out_TE = qk_TE.new_empty((qk_TE.shape[0], heads.query * heads.size))
    kept: list[Tensor | None] = []
    for block in blocks:
        if block.fused:
            rows, notes = flash.forward(gather(qk_TE, block), gather(v_TE, block), qk_TE, v_TE, block, heads)
        else:
            rows, notes = _forward(qk_TE, v_TE, block, heads)
        scatter(out_TE, rows, block)
        kept.append(notes if keep else None)
    return out_TE, kept


def backward(
    dout_TE: Tensor,
    out_TE: Tensor,
    qk_TE: Tensor,
    v_TE: Tensor,
    blocks: Sequence[DeviceBlock],
    heads: Heads,
    kept: Sequence[Tensor | None],
) -> Tensor:
    """Return the gradients of ``qk_TE`` and ``v_TE`` side by side."""
    grad_TE = qk_TE.new_empty((qk_TE.shape[0], qk_TE.shape[1] + v_TE.shape[1]))
    split = heads.query * heads.size
    dq_TE, dk_TE, dv_TE = grad_TE.tensor_split((split, heads.qk_width), dim=1)
    shared: list[tuple[Tensor, Tensor, Tensor]] = []
    for block, notes in zip(blocks, kept, strict=True):
        dout = gather(dout_TE, block)
        if block.real is not None:
            dout = dout * block.real[:, None]
        if block.fused:
            assert notes is not None
            rows, values, out = gather(qk_TE, block), gather(v_TE, block), gather(out_TE, block)
            g = flash.backward(dout, out, notes, rows, values, qk_TE, v_TE, block, heads)
        else:
            g = _backward(dout, qk_TE, v_TE, block, heads, notes)
        scatter(dq_TE, g.q, block)
        scatter(dk_TE, g.k, block)
        scatter(dv_TE, g.v, block)
        if g.pk is not None and g.pv is not None:
            shared.append((block.prefix, g.pk, g.pv))
    for rows, dk_rows, dv_rows in shared:  # after every row has its own part
        dk_TE.index_add_(0, rows, dk_rows)
        dv_TE.index_add_(0, rows, dv_rows)
    return grad_TE


def _forward(qk_TE: Tensor, v_TE: Tensor, block: DeviceBlock, heads: Heads) -> tuple[Tensor, Tensor | None]:
    _, _, length, prefix = block.shape
    x = _operands(qk_TE, v_TE, block, heads)
    single = length <= _CHUNK
    out = torch.empty_like(x.q)
    probs = None
    for start in range(0, length, _CHUNK):
        end = min(start + _CHUNK, length)
        q = x.q if single else x.q[..., start:end, :].contiguous()
        probs = _probabilities(q, x, start, end, block, heads)
        part = torch.bmm(_own(probs, q, prefix), x.v[:, :end])
        if prefix:
            part.view(x.pk.shape[0], -1, heads.size).baddbmm_(_prefix(probs, x, prefix), x.pv)
        if single:
            out = part.view(q.shape)
        else:
            out[..., start:end, :] = part.view(q.shape)
    rows = out.permute(0, 2, 4, 1, 3, 5)
    return rows, probs if single and length + prefix <= _KEEP_KEYS else None


def _backward(
    dout: Tensor, qk_TE: Tensor, v_TE: Tensor, block: DeviceBlock, heads: Heads, kept_probs: Tensor | None
) -> BlockGradients:
    families, siblings, length, prefix = block.shape
    x = _operands(qk_TE, v_TE, block, heads)
    dout = dout.view(families, siblings, length, heads.kv, heads.per_kv, heads.size)
    dout = dout.permute(0, 3, 1, 4, 2, 5).contiguous()
    single = length <= _CHUNK
    dq = torch.empty_like(x.q)
    dk, dv, dpk, dpv = (torch.zeros_like(t) for t in (x.k, x.v, x.pk, x.pv))
    for start in range(0, length, _CHUNK):
        end = min(start + _CHUNK, length)
        q = x.q if single else x.q[..., start:end, :].contiguous()
        do = dout if single else dout[..., start:end, :].contiguous()
        probs = _probabilities(q, x, start, end, block, heads) if kept_probs is None else kept_probs
        do_own = do.view(x.k.shape[0], -1, heads.size)
        do_all = do.view(families * heads.kv, -1, heads.size)
        dprobs = torch.bmm(do_own, x.v[:, :end].transpose(1, 2)).view(-1, end)
        if prefix:
            dprefix = torch.bmm(do_all, x.pv.transpose(1, 2)).view(-1, prefix)
            dprobs = torch.cat((dprefix, dprobs), dim=1)
        dscores = torch.ops.aten._softmax_backward_data(dprobs, probs, 1, probs.dtype)
        ds_own = _own(dscores, q, prefix)
        part = torch.bmm(ds_own, x.k[:, :end])
        _accumulate(dk, end, ds_own, q.view(x.k.shape[0], -1, heads.size), single)
        _accumulate(dv, end, _own(probs, q, prefix), do_own, single)
        if prefix:
            ds_all = _prefix(dscores, x, prefix)
            part.view(x.pk.shape[0], -1, heads.size).baddbmm_(ds_all, x.pk)
            _accumulate(dpk, prefix, ds_all, q.view(x.pk.shape[0], -1, heads.size), single)
            _accumulate(dpv, prefix, _prefix(probs, x, prefix), do_all, single)
        if single:
            dq = part.view(q.shape)
        else:
            dq[..., start:end, :] = part.view(q.shape)
    own = (families, heads.kv, siblings, length, heads.size)
    return BlockGradients(
        q=dq.mul_(heads.scale).permute(0, 2, 4, 1, 3, 5),
        k=dk.view(own).permute(0, 2, 3, 1, 4),
        v=dv.view(own).permute(0, 2, 3, 1, 4),
        pk=_prefix_rows(dpk, block, heads) if prefix else None,
        pv=_prefix_rows(dpv, block, heads) if prefix else None,
    )


def _operands(qk_TE: Tensor, v_TE: Tensor, block: DeviceBlock, heads: Heads) -> _Operands:
    families, siblings, length, prefix = block.shape
    split = heads.query * heads.size
    rows, values = gather(qk_TE, block), gather(v_TE, block)
    queries = rows[:, :split].view(families, siblings, length, heads.kv, heads.per_kv, heads.size)
    q = torch.empty(
        (families, heads.kv, siblings, heads.per_kv, length, heads.size), dtype=qk_TE.dtype, device=qk_TE.device
    )
    torch.mul(queries.permute(0, 3, 1, 4, 2, 5), heads.scale, out=q)
    own = (families, siblings, length, heads.kv, heads.size)
    flat = (families * heads.kv * siblings, length, heads.size)
    before = (families, prefix, heads.kv, heads.size)
    flat_before = (families * heads.kv, prefix, heads.size)
    pk, pv = qk_TE[:, split:].index_select(0, block.prefix), v_TE.index_select(0, block.prefix)
    return _Operands(
        q=q,
        k=rows[:, split:].view(own).permute(0, 3, 1, 2, 4).reshape(flat),
        v=values.view(own).permute(0, 3, 1, 2, 4).reshape(flat),
        pk=pk.view(before).transpose(1, 2).reshape(flat_before),
        pv=pv.view(before).transpose(1, 2).reshape(flat_before),
    )


def _probabilities(q: Tensor, x: _Operands, start: int, end: int, block: DeviceBlock, heads: Heads) -> Tensor:
    """Return softmax over [prefix, own keys up to ``end``] of queries ``[start, end)``: [F*K*S*G*queries, keys]."""
    size = end - start
    scores = torch.bmm(q.view(x.k.shape[0], -1, heads.size), x.k[:, :end].transpose(1, 2))
    hidden = torch.full((size, size), float("-inf"), dtype=q.dtype, device=q.device).triu_(1)
    scores.view(-1, size, end)[:, :, start:].add_(hidden)
    scores = scores.view(-1, end)
    prefix = block.shape[3]
    if prefix:
        before = torch.bmm(q.view(x.pk.shape[0], -1, heads.size), x.pk.transpose(1, 2))
        if block.prefix_bias is not None:
            before.view(block.shape[0], -1, prefix).add_(block.prefix_bias)
        scores = torch.cat((before.view(-1, prefix), scores), dim=1)
    return torch.softmax(scores, dim=1)


def _own(cells: Tensor, q: Tensor, prefix: int) -> Tensor:
    families, kv, siblings, per_kv, size, _ = q.shape
    return cells[:, prefix:].view(families * kv * siblings, per_kv * size, -1)


def _prefix(cells: Tensor, x: _Operands, prefix: int) -> Tensor:
    return cells[:, :prefix].view(x.pk.shape[0], -1, prefix)


def _accumulate(total: Tensor, end: int, cells: Tensor, rows: Tensor, only: bool) -> None:
    if only:
        torch.bmm(cells.transpose(1, 2), rows, out=total)
    else:
        total[:, :end] += torch.bmm(cells.transpose(1, 2), rows)


def _prefix_rows(grad: Tensor, block: DeviceBlock, heads: Heads) -> Tensor:
    families, _, _, prefix = block.shape
    return grad.view(families, heads.kv, prefix, heads.size).transpose(1, 2).reshape(families * prefix, -1)
