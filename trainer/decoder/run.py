"""One micro-batch through the model: forward, then backward once, as a single node of the autograd graph."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from trainer.decoder import layer as layers
from trainer.decoder import ops
from trainer.decoder.blocks import blocks
from trainer.decoder.head import Head, Queries, Scored, Tiling
from trainer.decoder.layer import Rows, Saved
from trainer.decoder.lora import Adapter, Gradients
from trainer.decoder.plan import Ids, MicroBatch, PlanSettings
from trainer.decoder.rows import DeviceBlock, Heads, Kind
from trainer.decoder.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSettings:
    """``activation_bytes`` bounds what a graph keeps for backward; layers beyond it are recomputed from their input.

    ``residual_dtype`` holds the residual stream and its gradient, ``head_dtype`` computes the unembedding (None: the
    compute dtype). ``attention`` forces one of the two ways; ``auto`` takes the faster one for each block.
    """

    plan: PlanSettings = field(default_factory=PlanSettings)
    activation_bytes: int = 1 << 30
    residual_dtype: torch.dtype = torch.float32
    head_dtype: torch.dtype | None = None
    attention: Kind = "auto"
    tiling: Tiling = field(default_factory=Tiling)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What all runs of a decoder share."""

    weights: Weights
    head: Head
    dtype: torch.dtype
    device: torch.device
    settings: DecoderSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryPlan:
    """``order`` [total targets] finds each target's query; ``need_T`` marks rows that may receive a gradient."""

    queries: Queries
    order: Tensor
    need_T: Tensor


def arrange(
    batch: MicroBatch, targets: Sequence[Tensor], need: Sequence[Tensor] | None, device: torch.device
) -> QueryPlan:
    rows: list[Ids] = []
    marked = np.full(len(batch.tokens), need is None)
    for i, (path, target) in enumerate(zip(batch.paths, targets, strict=True)):
        mine = batch.rows(path)
        if target.shape[:1] != mine.shape:
            raise ValueError(
                f"datum {batch.datums[i]} has {len(mine)} tokens and targets of shape {list(target.shape)}"
            )
        if need is not None:
            marked[mine[need[i].cpu().numpy()]] = True
        rows.append(np.repeat(mine, target.numel() // len(mine)))
    rows_Q = np.concatenate(rows)
    order = np.argsort(rows_Q, kind="stable")
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    bounds = np.searchsorted(rows_Q[order], np.arange(len(batch.tokens) + 1))
    tokens_Q = torch.cat([target.reshape(-1) for target in targets]).cpu()[torch.from_numpy(order)]
    queries = Queries(
        rows_Q=torch.from_numpy(rows_Q[order]).to(device),
        tokens_Q=tokens_Q.to(device),
        first_T=torch.from_numpy(bounds[:-1]).to(device),
        bounds=tuple(bounds.tolist()),
    )
    return QueryPlan(
        queries=queries, order=torch.from_numpy(inverse).to(device), need_T=torch.from_numpy(marked).to(device)
    )


class Run:
    """One micro-batch, forward and then backward once."""

    def __init__(
        self,
        model: Model,
        batch: MicroBatch,
        adapter: Adapter,
        query_plan: QueryPlan,
        scale: float,
        temperature: float,
        names: tuple[str, ...],
        train: bool,
        served: torch.dtype | None,
    ) -> None:
        self._m = model
        self._batch = batch
        self._adapter = adapter
        self._q = query_plan
        self._scale = scale
        self._temperature = temperature
        self._names = names
        self._train = train
        self._served = served
        self._inputs: list[Tensor] = []
        self._saved: list[Saved | None] = []
        self._final: tuple[Tensor, Tensor, Tensor] | None = None
        self._scored: Scored | None = None
        self._rows = self._make_rows()

    def forward(self) -> Tensor:
        """Return the log-probability of every query."""
        w, settings = self._m.weights, self._m.settings
        tokens = torch.from_numpy(self._batch.tokens).to(self._m.device)
        x = w.embedding.index_select(0, tokens).to(settings.residual_dtype)
        keep = self._kept_layers(len(self._batch.tokens)) if self._train else 0
        for index, (layer, lora) in enumerate(zip(w.layers, self._adapter.layers, strict=True)):
            if self._train:
                self._inputs.append(x)
            x, saved = layers.forward(x, layer, lora, self._rows, save=len(w.layers) - index <= keep)
            self._saved.append(saved)
        h, rstd = ops.rms_norm(x, w.final_norm, w.eps, self._m.dtype)
        need = self._q.need_T if self._train else None
        scored = self._m.head.score(h, self._q.queries, self._adapter.head, self._temperature, need)
        if self._train:
            self._final, self._scored = (x, h, rstd), scored
        return scored.logprobs_Q

    def backward(self, grad_Q: Tensor) -> list[Tensor]:
        """Return the gradients of the masters, in the order of their names."""
        if self._final is None or self._scored is None:
            raise RuntimeError("the graph of this micro-batch was already used")
        w = self._m.weights
        x, h, rstd = self._final
        sink = Gradients(scale=self._scale)
        dh = self._m.head.backward(
            grad_Q, h, self._q.queries, self._scored, self._adapter.head, self._temperature, sink
        )
        dx = torch.zeros_like(x)
        ops.rms_norm_backward_(dx, dh, x, rstd, w.final_norm)
        self._final = self._scored = None
        del x, h, dh
        for index in reversed(range(len(w.layers))):
            x, saved = self._inputs.pop(), self._saved.pop()
            layer, lora = w.layers[index], self._adapter.layers[index]
            if saved is None:
                _, saved = layers.forward(x, layer, lora, self._rows, save=True)
            assert saved is not None
            layers.backward_(dx, x, saved, layer, lora, self._rows, sink, first=index == 0)
        return sink.take(self._names)

    def _make_rows(self) -> Rows:
        m, w = self._m, self._m.weights
        positions = torch.from_numpy(self._batch.positions).to(m.device)
        angles = positions[:, None].float() * w.inv_freq.to(m.device, torch.float32)
        return Rows(
            cos=(angles.cos() * w.rope_scale)[:, None, :],
            sin=(angles.sin() * w.rope_scale)[:, None, :],
            blocks=[DeviceBlock.of(block, m.device, m.dtype, m.settings.attention) for block in blocks(self._batch)],
            heads=Heads(query=w.heads, kv=w.kv_heads, size=w.head_dim, scale=w.score_scale),
            dtype=m.dtype,
            eps=w.eps,
            served=self._served,
        )

    def _kept_layers(self, rows: int) -> int:
        """Return how many of the last layers keep their activations; a rule of the row count and the setting."""
        w, settings = self._m.weights, self._m.settings
        layer = w.layers[0]
        wide = settings.residual_dtype.itemsize * layer.input_norm.shape[0]
        narrow = self._m.dtype.itemsize
        features = (2 * w.heads + 2 * w.kv_heads) * w.head_dim + layer.gate_up.weight.shape[0]
        if layer.q_norm is not None:
            features += (w.heads + w.kv_heads) * w.head_dim
        extra = rows * (wide + narrow * features)
        inputs = rows * wide * len(w.layers)
        return max(0, min(len(w.layers), (settings.activation_bytes - inputs) // extra))


class Logprobs(Function):
    """Ties a run to autograd: its inputs are the masters, its output the log-probabilities of all queries."""

    @staticmethod
    def forward(ctx: Any, run: Run, *masters: Tensor) -> Tensor:
        ctx.run = run
        return run.forward()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return (None, *ctx.run.backward(grads[0]))
