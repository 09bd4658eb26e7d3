"""The decoder: target log-probabilities of sequences under a LoRA adapter, differentiable in the adapter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from trainer.decoder import layer as layers
from trainer.decoder import lora as loras
from trainer.decoder import ops, weights
from trainer.decoder.attention import DeviceBlock, Heads
from trainer.decoder.blocks import blocks
from trainer.decoder.head import Head, Queries, Scored, Tiling
from trainer.decoder.layer import Rows, Saved
from trainer.decoder.lora import Adapter, Gradients
from trainer.decoder.plan import Ids, MicroBatch, PlanSettings, plan


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSettings:
    """``activation_bytes`` bounds what a graph keeps for backward; layers beyond it are recomputed from their input.

    ``residual_dtype`` holds the residual stream and its gradient, ``head_dtype`` computes the unembedding (None: the
    compute dtype).
    """

    plan: PlanSettings = PlanSettings()
    activation_bytes: int = 1 << 30
    residual_dtype: torch.dtype = torch.float32
    head_dtype: torch.dtype | None = None
    tiling: Tiling = Tiling()


class LoraDecoder:
    """A fast path for Llama, Qwen2 and Qwen3; see ``supports``. It reads the model's weights and copies none.

    Not for use by two threads at once: the head's buffers are its own.
    """

    def __init__(
        self, hf_model: Any, *, compute_dtype: torch.dtype, settings: DecoderSettings = DecoderSettings()
    ) -> None:
        self._weights = weights.read(hf_model)
        held = self._weights.embedding.dtype
        if held != compute_dtype:
            raise ValueError(f"the base model is held in {held}; computing in {compute_dtype} would need a copy")
        self._dtype = compute_dtype
        self._settings = settings
        self._device = self._weights.embedding.device
        self._head = Head(self._weights.head.weight, settings.head_dtype or compute_dtype, settings.tiling)

    def plan(self, sequences: Sequence[Tensor] | Sequence[Ids]) -> list[MicroBatch]:
        """Split an operation's token sequences into micro-batches; each datum is in exactly one."""
        return plan([np.asarray(sequence) for sequence in sequences], self._settings.plan)

    def logprobs(
        self,
        sequences: Sequence[Tensor],
        targets: Sequence[Tensor],
        lora: Mapping[str, Tensor],
        scale: float,
        *,
        need_grad_positions: Sequence[Tensor] | None = None,
        temperature: float = 1.0,
    ) -> list[Tensor]:
        """Return float32 log-probabilities shaped like ``targets`` ([N] or [N, K]), one tensor per sequence.

        All micro-batches' graphs live at once: for bounded memory iterate ``plan`` and call ``micro_batch`` on each.
        """
        found: dict[int, Tensor] = {}
        for batch in self.plan(sequences):
            chosen = [targets[i] for i in batch.datums]
            needed = None if need_grad_positions is None else [need_grad_positions[i] for i in batch.datums]
            parts = self.micro_batch(batch, chosen, lora, scale, need_grad_positions=needed, temperature=temperature)
            found.update(zip(batch.datums, parts, strict=True))
        return [found[index] for index in range(len(sequences))]

    def micro_batch(
        self,
        batch: MicroBatch,
        targets: Sequence[Tensor],
        lora: Mapping[str, Tensor],
        scale: float,
        *,
        need_grad_positions: Sequence[Tensor] | None = None,
        temperature: float = 1.0,
    ) -> list[Tensor]:
        """As ``logprobs``, for the datums of one micro-batch: ``targets[i]`` belongs to ``batch.datums[i]``.

        ``need_grad_positions[i]`` (bool [N]) marks positions that may receive a gradient; None: all. A gradient
        anywhere else raises ValueError in backward.
        """
        adapter = loras.cast(lora, self._weights, scale, self._dtype)
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in lora.values())
        query_plan = _queries(batch, targets, need_grad_positions, self._device)
        run = _Run(self, batch, adapter, query_plan, scale, temperature, tuple(lora), wanted)
        flat: Tensor = _Logprobs.apply(run, *lora.values())  # pyright: ignore
        ordered = flat[query_plan.order]
        sizes = [target.numel() for target in targets]
        return [part.view(t.shape) for part, t in zip(ordered.split(sizes), targets, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _QueryPlan:
    """``order`` [total targets] finds each target's query; ``need_T`` marks rows that may receive a gradient."""

    queries: Queries
    order: Tensor
    need_T: Tensor


def _queries(
    batch: MicroBatch, targets: Sequence[Tensor], need: Sequence[Tensor] | None, device: torch.device
) -> _QueryPlan:
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
    return _QueryPlan(
        queries=queries, order=torch.from_numpy(inverse).to(device), need_T=torch.from_numpy(marked).to(device)
    )


class _Run:
    """One micro-batch, forward and then backward once."""

    def __init__(
        self,
        decoder: LoraDecoder,
        batch: MicroBatch,
        adapter: Adapter,
        query_plan: _QueryPlan,
        scale: float,
        temperature: float,
        names: tuple[str, ...],
        train: bool,
    ) -> None:
        self._d = decoder
        self._batch = batch
        self._adapter = adapter
        self._q = query_plan
        self._scale = scale
        self._temperature = temperature
        self._names = names
        self._train = train
        self._inputs: list[Tensor] = []
        self._saved: list[Saved | None] = []
        self._final: tuple[Tensor, Tensor, Tensor] | None = None
        self._scored: Scored | None = None
        self._rows = self._make_rows()

    def forward(self) -> Tensor:
        """Return the log-probability of every query."""
        w, settings = self._d._weights, self._d._settings
        tokens = torch.from_numpy(self._batch.tokens).to(self._d._device)
        x = w.embedding.index_select(0, tokens).to(settings.residual_dtype)
        keep = self._kept_layers(len(self._batch.tokens)) if self._train else 0
        for index, (layer, lora) in enumerate(zip(w.layers, self._adapter.layers, strict=True)):
            if self._train:
                self._inputs.append(x)
            x, saved = layers.forward(x, layer, lora, self._rows, save=len(w.layers) - index <= keep)
            self._saved.append(saved)
        h, rstd = ops.rms_norm(x, w.final_norm, w.eps, self._d._dtype)
        need = self._q.need_T if self._train else None
        scored = self._d._head.score(h, self._q.queries, self._adapter.head, self._temperature, need)
        if self._train:
            self._final, self._scored = (x, h, rstd), scored
        return scored.logprobs_Q

    def backward(self, grad_Q: Tensor) -> list[Tensor]:
        """Return the gradients of the masters, in the order of their names."""
        if self._final is None or self._scored is None:
            raise RuntimeError("the graph of this micro-batch was already used")
        w = self._d._weights
        x, h, rstd = self._final
        sink = Gradients(scale=self._scale)
        dh = self._d._head.backward(
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
        return [sink.by_name[name] for name in self._names]

    def _make_rows(self) -> Rows:
        d, w = self._d, self._d._weights
        positions = torch.from_numpy(self._batch.positions).to(d._device)
        angles = positions[:, None].float() * w.inv_freq.to(d._device, torch.float32)
        return Rows(
            cos=(angles.cos() * w.rope_scale).to(d._dtype)[:, None, :],
            sin=(angles.sin() * w.rope_scale).to(d._dtype)[:, None, :],
            blocks=[DeviceBlock.of(block, d._device, d._dtype) for block in blocks(self._batch)],
            heads=Heads(query=w.heads, kv=w.kv_heads, size=w.head_dim, scale=w.score_scale),
            dtype=d._dtype,
            eps=w.eps,
        )

    def _kept_layers(self, rows: int) -> int:
        """Return how many of the last layers keep their activations; a rule of the row count and the setting."""
        w, settings = self._d._weights, self._d._settings
        layer = w.layers[0]
        wide = settings.residual_dtype.itemsize * layer.input_norm.shape[0]
        narrow = self._d._dtype.itemsize
        features = (2 * w.heads + 2 * w.kv_heads) * w.head_dim + 2 * layer.gate.weight.shape[0]
        if layer.q_norm is not None:
            features += (w.heads + w.kv_heads) * w.head_dim
        extra = rows * (wide + narrow * features)
        inputs = rows * wide * len(w.layers)
        return max(0, min(len(w.layers), (settings.activation_bytes - inputs) // extra))


class _Logprobs(Function):
    """Ties a run to autograd: its inputs are the masters, its output the log-probabilities of all queries."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *masters: Tensor) -> Tensor:
        ctx.run = run
        return run.forward()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return (None, *ctx.run.backward(grads[0]))


def with_settings(settings: DecoderSettings, **changes: Any) -> DecoderSettings:
    """Return settings with some of the plan's fields changed."""
    return replace(settings, plan=replace(settings.plan, **changes))
