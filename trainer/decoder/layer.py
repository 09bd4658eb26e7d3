"""One decoder layer, forward and backward by hand, over the packed rows of a micro-batch.

Suffixes: T rows, D hidden features, E features of a projection, F features of the MLP. The residual stream and its
gradient may be wider than the compute dtype, in which every matrix product runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.decoder import attention, ops
from trainer.decoder.lora import Gradients, Group, LayerLora
from trainer.decoder.rows import DeviceBlock, Heads
from trainer.decoder.weights import Layer, Projection


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What all layers share: rotary factors [T, 1, head size / 2], attention blocks, dtype, epsilon.

    ``served`` is the dtype of an engine whose way of adding LoRA is followed; None: the exact way.
    """

    cos: Tensor
    sin: Tensor
    blocks: Sequence[DeviceBlock]
    heads: Heads
    dtype: torch.dtype
    eps: float
    served: torch.dtype | None


@dataclass(slots=True, kw_only=True)
class Saved:
    """What backward reads again. ``raw_qk`` only where q and k are normalised."""

    rstd1: Tensor
    z_qkv: Tensor | None
    raw_qk: Tensor | None
    rstd_qk: tuple[Tensor, Tensor] | None
    qk: Tensor  # rotated; with v a view of one tensor, unless normalised
    v: Tensor
    notes: list[Tensor | None]
    attended: Tensor
    z_o: Tensor | None
    x2: Tensor
    rstd2: Tensor
    z_gate_up: Tensor | None
    gate_up: Tensor
    z_down: Tensor | None


def forward(x_TD: Tensor, layer: Layer, lora: LayerLora, rows: Rows, *, save: bool) -> tuple[Tensor, Saved | None]:
    """Return the layer's output and, with ``save``, what ``backward`` needs beside ``x_TD``."""
    heads = rows.heads
    count = x_TD.shape[0]
    h, rstd1 = ops.rms_norm(x_TD, layer.input_norm, rows.eps, rows.dtype)
    z_qkv = lora.qkv.inner(h)
    qk, v = project(h, layer.qkv, lora.qkv, z_qkv, rows.served).tensor_split((heads.qk_width,), dim=1)
    del h
    raw_qk, rstd_qk = None, None
    if layer.q_norm is not None and layer.k_norm is not None:
        raw_qk = qk
        qk, rstd_qk = _normalise_heads(qk, layer.q_norm, layer.k_norm, rows)
    ops.rotate_(qk.view(count, heads.query + heads.kv, heads.size), rows.cos, rows.sin)
    attended, notes = attention.forward(qk, v, rows.blocks, heads, keep=save)
    z_o = lora.o.inner(attended)
    x2 = _joined(x_TD, project(attended, layer.o, lora.o, z_o, rows.served))
    h, rstd2 = ops.rms_norm(x2, layer.post_norm, rows.eps, rows.dtype)
    z_gate_up = lora.gate_up.inner(h)
    gate_up = project(h, layer.gate_up, lora.gate_up, z_gate_up, rows.served)
    del h
    act = ops.swiglu(gate_up)
    z_down = lora.down.inner(act)
    x3 = _joined(x2, project(act, layer.down, lora.down, z_down, rows.served))
    if not save:
        return x3, None
    saved = Saved(
        rstd1=rstd1,
        z_qkv=z_qkv,
        raw_qk=raw_qk,
        rstd_qk=rstd_qk,
        qk=qk,
        v=v,
        notes=notes,
        attended=attended,
        z_o=z_o,
        x2=x2,
        rstd2=rstd2,
        z_gate_up=z_gate_up,
        gate_up=gate_up,
        z_down=z_down,
    )
    return x3, saved


def backward_(
    dx_TD: Tensor,
    x_TD: Tensor,
    saved: Saved,
    layer: Layer,
    lora: LayerLora,
    rows: Rows,
    sink: Gradients,
    *,
    first: bool,
) -> None:
    """Turn the gradient of the output into that of the input, in place, and put LoRA gradients into ``sink``.

    With ``first`` nothing below needs the input's gradient, and ``dx_TD`` is left meaningless.
    """
    heads = rows.heads
    dy = dx_TD.to(rows.dtype)
    dz = lora.down.inner_gradient(dy)
    d_act = _into_inner(torch.mm(dy, layer.down.weight), dz, lora.down.A_RI)
    d_gate_up, act = ops.swiglu_backward(d_act, saved.gate_up)
    lora.down.collect(act, saved.z_down, dz, dy, sink)
    del act, d_act
    dz = lora.gate_up.inner_gradient(d_gate_up)
    h = ops.apply_rms_norm(saved.x2, saved.rstd2, layer.post_norm, rows.dtype)
    lora.gate_up.collect(h, saved.z_gate_up, dz, d_gate_up, sink)
    del h
    dh = _into_inner(torch.mm(d_gate_up, layer.gate_up.weight), dz, lora.gate_up.A_RI)
    del d_gate_up
    ops.rms_norm_backward_(dx_TD, dh, saved.x2, saved.rstd2, layer.post_norm)

    dy = dx_TD.to(rows.dtype)
    dz = lora.o.inner_gradient(dy)
    lora.o.collect(saved.attended, saved.z_o, dz, dy, sink)
    d_attended = _into_inner(torch.mm(dy, layer.o.weight), dz, lora.o.A_RI)
    dqkv = attention.backward(d_attended, saved.attended, saved.qk, saved.v, rows.blocks, heads, saved.notes)
    dqk = dqkv[:, : heads.qk_width]
    ops.rotate_(dqk.view(dqk.shape[0], heads.query + heads.kv, heads.size), rows.cos, -rows.sin)
    if saved.raw_qk is not None and saved.rstd_qk is not None:
        dqk.copy_(_normalise_heads_backward(dqk, saved.raw_qk, saved.rstd_qk, layer, rows))
    dz = lora.qkv.inner_gradient(dqkv)
    if dz is not None:
        h = ops.apply_rms_norm(x_TD, saved.rstd1, layer.input_norm, rows.dtype)
        lora.qkv.collect(h, saved.z_qkv, dz, dqkv, sink)
        del h
    if first:
        return
    dh = _into_inner(torch.mm(dqkv, layer.qkv.weight), dz, lora.qkv.A_RI)
    ops.rms_norm_backward_(dx_TD, dh, x_TD, saved.rstd1, layer.input_norm)


def project(
    x_TI: Tensor, projection: Projection, lora: Group, z_TR: Tensor | None, served: torch.dtype | None
) -> Tensor:
    """Return ``x W^T + bias + LoRA``. The large product comes last, onto the small terms: its sum is rounded once.

    Engines round the large product first (``served``), and terms below half a unit of its last place vanish.
    """
    if served is not None and z_TR is not None:
        product = torch.nn.functional.linear(x_TI, projection.weight, projection.bias).to(served).float()
        lora.add(z_TR, product)
        return product.to(served).to(x_TI.dtype)
    out_TO = x_TI.new_empty((x_TI.shape[0], projection.weight.shape[0]))
    started = lora.term(z_TR, out_TO)
    if projection.bias is not None:
        if started:
            out_TO.add_(projection.bias)
        else:
            out_TO.copy_(projection.bias.expand_as(out_TO))
            started = True
    if started:
        return out_TO.addmm_(x_TI, projection.weight.t())
    return torch.mm(x_TI, projection.weight.t(), out=out_TO)


def _joined(x_TD: Tensor, y_TD: Tensor) -> Tensor:
    """Return ``x + y`` in the dtype of the residual stream; may overwrite ``y``."""
    return y_TD.add_(x_TD) if x_TD.dtype == y_TD.dtype else x_TD + y_TD


def _into_inner(dx: Tensor, dz: Tensor | None, A: Tensor | None) -> Tensor:
    return dx if dz is None or A is None else dx.addmm_(dz, A)


def _normalise_heads(
    raw_qk: Tensor, q_norm: Tensor, k_norm: Tensor, rows: Rows
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    heads = rows.heads
    split = heads.query * heads.size
    out = torch.empty_like(raw_qk)
    rstds: list[Tensor] = []
    for part, weight in ((slice(0, split), q_norm), (slice(split, None), k_norm)):
        each = _heads(raw_qk[:, part], heads.size)
        normed, rstd = ops.rms_norm(each, weight, rows.eps, rows.dtype)
        out[:, part] = normed.flatten(1)
        rstds.append(rstd)
    return out, (rstds[0], rstds[1])


def _normalise_heads_backward(
    dqk: Tensor, raw_qk: Tensor, rstds: tuple[Tensor, Tensor], layer: Layer, rows: Rows
) -> Tensor:
    assert layer.q_norm is not None
    assert layer.k_norm is not None
    heads = rows.heads
    split = heads.query * heads.size
    total = torch.zeros(dqk.shape, dtype=torch.float32, device=dqk.device)
    halves = ((slice(0, split), layer.q_norm, rstds[0]), (slice(split, None), layer.k_norm, rstds[1]))
    for part, weight, rstd in halves:
        ops.rms_norm_backward_(
            _heads(total[:, part], heads.size),
            _heads(dqk[:, part], heads.size),
            _heads(raw_qk[:, part], heads.size),
            rstd,
            weight,
        )
    return total.to(rows.dtype)


def _heads(x_TE: Tensor, size: int) -> Tensor:
    """View rows as [T, heads, size]."""
    return x_TE.view(x_TE.shape[0], -1, size)
