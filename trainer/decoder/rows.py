"""Between packed rows and attention blocks: a block's indices on the device, gathering and scattering.

Suffixes as in ``attention``.
"""

import sys
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer.decoder.blocks import Block

Kind = Literal["auto", "matmul", "fused"]
_BFLOAT16_KEYS = 512  # below, the fused kernel's bfloat16 backward is several times slower than matmul and softmax


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

    @property
    def qk_width(self) -> int:
        """Features of a row's queries and keys."""
        return (self.query + self.kv) * self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBlock:
    """A block's indices on the device. ``real`` [F*S*L] marks rows that exist; None: all do.

    ``fused`` chooses between ``flash`` and matmul with softmax.
    """

    shape: tuple[int, int, int, int]
    span: tuple[int, int] | None
    own: Tensor
    real: Tensor | None
    prefix: Tensor
    prefix_bias: Tensor | None  # [F, 1, P], 0 or -inf
    fused: bool

    @classmethod
    def of(cls, block: Block, device: torch.device, dtype: torch.dtype, kind: Kind) -> "DeviceBlock":
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
            fused=kind == "fused" or (kind == "auto" and _fused_pays(block, device, dtype)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGradients:
    """Of a block's rows: own q, k, v as [F, S, L, ...]; prefix k and v as [F * P, ...], None without a prefix."""

    q: Tensor
    k: Tensor
    v: Tensor
    pk: Tensor | None
    pv: Tensor | None


def gather(x_TE: Tensor, block: DeviceBlock) -> Tensor:
    """Return a block's rows [F * S * L, E], a view where they lie together."""
    return x_TE[block.span[0] : block.span[1]] if block.span is not None else x_TE.index_select(0, block.own)


def scatter(target_TE: Tensor, rows: Tensor, block: DeviceBlock) -> None:
    """Write a block's rows [F, S, L, ...] (or flat) to where they belong; padding is dropped."""
    if block.span is not None:
        target_TE[block.span[0] : block.span[1]].view(rows.shape).copy_(rows)
        return
    flat = rows.reshape(block.own.shape[0], -1)
    if block.real is None:
        target_TE.index_copy_(0, block.own, flat)
    else:
        target_TE.index_copy_(0, block.own[block.real], flat[block.real])


def fused_beyond(dtype: torch.dtype) -> int:
    """Return up to how many keys a CPU's attention scores are materialised: beyond, the fused kernel is faster."""
    if dtype == torch.float32:
        return 0
    return _BFLOAT16_KEYS if dtype == torch.bfloat16 else sys.maxsize


def _fused_pays(block: Block, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's fused CPU kernel is the faster way; a rule of shape, dtype and device alone."""
    return device.type == "cpu" and block.shape[2] + block.shape[3] > fused_beyond(dtype)
