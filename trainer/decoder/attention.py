"""Causal attention over a micro-batch's blocks: matmul and softmax, queries in chunks, probabilities kept or not.

Suffixes: F families, S siblings, L own length, P prefix length, K key/value heads, G query heads per key/value head,
D head size. All products run over contiguous copies of a block's rows; queries lie as [F, K, S, G, L, D], so that one
view of them meets the shared prefix ([F * K, S * G * L, D]) and another the sibling's own keys ([F * K * S, G * L, D]).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.decoder.blocks import Block

_CHUNK = 256  # queries of a sibling computed at once; half as many score cells are wasted as with whole sequences
_KEEP_KEYS = 256  # with at most so many keys the probabilities are kept for backward, else recomputed


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Numbers of query and key/value heads, head size, and the factor on scores."""

    query: int
    kv: int
    size: int
    scale: float

    @property
    def per_kv(self) -> int:
        return self.query // self.kv


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBlock:
    """A block's indices on the device. ``real`` [F*S*L] marks rows that exist; None: all do."""

    shape: tuple[int, int, int, int]
    span: tuple[int, int] | None
    own: Tensor
    real: Tensor | None
    prefix: Tensor
    prefix_bias: Tensor | None  # [F, 1, P], 0 or -inf

    @classmethod
    def of(cls, block: Block, device: torch.device, dtype: torch.dtype) -> "DeviceBlock":
        own = torch.from_numpy(block.own_rows.reshape(-1))
        prefix = torch.from_numpy(block.prefix_rows)
        bias = torch.zeros(prefix.shape, dtype=dtype).masked_fill_(prefix < 0, float("-inf"))[:, None, :]
        return cls(
            shape=block.shape,
            span=block.span,
            own=own.clamp(min=0).to(device),
            real=None if bool((own >= 0).all()) else (own >= 0).to(device),
            prefix=prefix.clamp(min=0).reshape(-1).to(device),
            prefix_bias=bias.to(device) if bool((prefix < 0).any()) else None,
        )


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
    """Return the attention output [T, heads * D], and per block the probabilities where keeping them is cheap."""
    out_TE = qk_TE.new_empty((qk_TE.shape[0], heads.query * heads.size))
    kept: list[Tensor | None] = []
    for block in blocks:
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
        kept.append(probs if keep and single and length + prefix <= _KEEP_KEYS else None)
        rows = out.permute(0, 2, 4, 1, 3, 5)
        _scatter(out_TE, rows, block)
    return out_TE, kept


def backward(
    dout_TE: Tensor,
    qk_TE: Tensor,
    v_TE: Tensor,
    blocks: Sequence[DeviceBlock],
    heads: Heads,
    kept: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``qk_TE`` and ``v_TE``."""
    dqk_TE, dv_TE = torch.empty_like(qk_TE), torch.empty_like(v_TE)
    split = heads.query * heads.size
    shared: list[tuple[Tensor, Tensor, Tensor]] = []
    for block, kept_probs in zip(blocks, kept, strict=True):
        families, siblings, length, prefix = block.shape
        x = _operands(qk_TE, v_TE, block, heads)
        dout = _rows(dout_TE, block)
        if block.real is not None:
            dout = dout * block.real[:, None]
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
            dprobs = torch.bmm(do_own, x.v[:, :end].transpose(1, 2)).view(-1, end)
            if prefix:
                do_all = do.view(x.pk.shape[0], -1, heads.size)
                dprefix = torch.bmm(do_all, x.pv.transpose(1, 2)).view(-1, prefix)
                dprobs = torch.cat((dprefix, dprobs), dim=1)
            dscores = torch._softmax_backward_data(dprobs, probs, 1, probs.dtype)  # pyright: ignore
            q_own = q.view(x.k.shape[0], -1, heads.size)
            ds_own = _own(dscores, q, prefix)
            part = torch.bmm(ds_own, x.k[:, :end])
            _accumulate(dk, end, ds_own, q_own, single)
            _accumulate(dv, end, _own(probs, q, prefix), do_own, single)
            if prefix:
                ds_all = _prefix(dscores, x, prefix)
                part.view(x.pk.shape[0], -1, heads.size).baddbmm_(ds_all, x.pk)
                _accumulate(dpk, prefix, ds_all, q.view(x.pk.shape[0], -1, heads.size), single)
                _accumulate(dpv, prefix, _prefix(probs, x, prefix), do_all, single)  # pyright: ignore
            if single:
                dq = part.view(q.shape)
            else:
                dq[..., start:end, :] = part.view(q.shape)
        _scatter(dqk_TE[:, :split], dq.mul_(heads.scale).permute(0, 2, 4, 1, 3, 5), block)
        own = (families, heads.kv, siblings, length, heads.size)
        _scatter(dqk_TE[:, split:], dk.view(own).permute(0, 2, 3, 1, 4), block)
        _scatter(dv_TE, dv.view(own).permute(0, 2, 3, 1, 4), block)
        if prefix:
            shared.append((block.prefix, _prefix_rows(dpk, block, heads), _prefix_rows(dpv, block, heads)))
    for rows, dk_rows, dv_rows in shared:  # after every row has its own part
        dqk_TE[:, split:].index_add_(0, rows, dk_rows)
        dv_TE.index_add_(0, rows, dv_rows)
    return dqk_TE, dv_TE


def _operands(qk_TE: Tensor, v_TE: Tensor, block: DeviceBlock, heads: Heads) -> _Operands:
    families, siblings, length, prefix = block.shape
    split = heads.query * heads.size
    rows, values = _rows(qk_TE, block), _rows(v_TE, block)
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


def _rows(x_TE: Tensor, block: DeviceBlock) -> Tensor:
    return x_TE[block.span[0] : block.span[1]] if block.span is not None else x_TE.index_select(0, block.own)


def _scatter(target_TE: Tensor, rows: Tensor, block: DeviceBlock) -> None:
    """Write a block's rows [F, S, L, ...] to where they belong; padding is dropped."""
    if block.span is not None:
        target_TE[block.span[0] : block.span[1]].view(rows.shape).copy_(rows)
        return
    flat = rows.reshape(block.own.shape[0], -1)
    if block.real is None:
        target_TE.index_copy_(0, block.own, flat)
    else:
        target_TE.index_copy_(0, block.own[block.real], flat[block.real])


def _prefix_rows(grad: Tensor, block: DeviceBlock, heads: Heads) -> Tensor:
    families, _, _, prefix = block.shape
    return grad.view(families, heads.kv, prefix, heads.size).transpose(1, 2).reshape(families * prefix, -1)
