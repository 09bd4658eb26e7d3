"""The decoder: target log-probabilities of sequences under a LoRA adapter, differentiable in the adapter."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from trainer.decoder import lora as loras
from trainer.decoder import weights
from trainer.decoder.head import Head
from trainer.decoder.plan import Ids, MicroBatch, PlanSettings, plan_each
from trainer.decoder.run import DecoderSettings, Logprobs, Model, Run, arrange


class LoraDecoder:
    """A fast path for Llama, Qwen2 and Qwen3; see ``supports``. It reads the model's weights and copies none.

    Not for use by two threads at once: the head's buffers are its own.
    """

    def __init__(self, hf_model: Any, *, compute_dtype: torch.dtype, settings: DecoderSettings | None = None) -> None:
        settings = settings or DecoderSettings()
        read = weights.read(hf_model)
        held = read.embedding.dtype
        if held != compute_dtype:
            raise ValueError(f"the base model is held in {held}; computing in {compute_dtype} would need a copy")
        self.model = Model(
            weights=read,
            head=Head(read.head.weight, settings.head_dtype or compute_dtype, settings.tiling),
            dtype=compute_dtype,
            device=read.embedding.device,
            settings=settings,
        )

    def plan(
        self, sequences: Sequence[Tensor] | Sequence[Ids], targets: Sequence[int] | None = None
    ) -> list[MicroBatch]:
        """Split an operation's token sequences into micro-batches; each datum is in exactly one."""
        return list(self.plan_each(sequences, targets))

    def plan_each(
        self,
        sequences: Sequence[Tensor] | Sequence[Ids],
        targets: Sequence[int] | None = None,
        settings: PlanSettings | None = None,
    ) -> Iterator[MicroBatch]:
        """As ``plan``, one micro-batch at a time; ``targets`` counts the log-probabilities asked of each sequence.

        ``settings`` stand in the place of the decoder's own.
        """
        settings = settings or self.model.settings.plan
        return plan_each([np.asarray(sequence) for sequence in sequences], settings, targets)

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
        served: torch.dtype | None = None,
    ) -> list[Tensor]:
        """As ``logprobs``, for the datums of one micro-batch: ``targets[i]`` belongs to ``batch.datums[i]``.

        With ``served`` LoRA is added as engines of that dtype add it: to a product that is rounded already.

        ``need_grad_positions[i]`` (bool [N]) marks positions that may receive a gradient; None: all. A gradient
        anywhere else raises ValueError in backward.
        """
        adapter = loras.cast(lora, self.model.weights, scale, self.model.dtype)
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in lora.values())
        queries = arrange(batch, targets, need_grad_positions, self.model.device)
        run = Run(self.model, batch, adapter, queries, scale, temperature, tuple(lora), wanted, served)
        flat = cast(Tensor, Logprobs.apply(run, *lora.values()))
        ends = np.cumsum([target.numel() for target in targets])
        ordered = flat[queries.order]
        return [ordered[end - t.numel() : end].view(t.shape) for end, t in zip(ends.tolist(), targets, strict=True)]
