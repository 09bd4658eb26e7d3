"""Our side of the benchmark: ``LoraDecoder`` plus fused AdamW, driven as the backend drives it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.bench.batches import LINEAR, Batch, Datum, loss_sum
from trainer.decoder import DecoderSettings, LoraDecoder


class DecoderLoop:
    """One LoRA adapter of ``rank`` on all linear layers; float32 masters, ``dtype`` compute."""

    def __init__(
        self,
        model_path: Path,
        dtype: torch.dtype,
        *,
        rank: int = 8,
        seed: int = 0,
        settings: DecoderSettings | None = None,
        model: Any = None,
    ) -> None:
        if model is None:
            model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype).requires_grad_(False)
        self.model = model
        self.decoder = LoraDecoder(model, compute_dtype=dtype, settings=settings or DecoderSettings())
        self.scale = 2.0
        generator = torch.Generator().manual_seed(seed)
        self.parameters: dict[str, Tensor] = {}
        for path, module in model.named_modules():
            if isinstance(module, nn.Linear) and path.rpartition(".")[2] in LINEAR:
                shapes = {"A": (rank, module.in_features), "B": (module.out_features, rank)}
                for side, shape in shapes.items():
                    master = torch.randn(shape, generator=generator) * 0.02
                    self.parameters[f"base_model.model.{path}.lora_{side}.weight"] = master.requires_grad_()
        self._optimizer = torch.optim.AdamW(self.parameters.values(), lr=1e-5, fused=True)

    def load(self, parameters: dict[str, Tensor]) -> None:
        """Take over the values of a PEFT model's parameters."""
        with torch.no_grad():
            for name, value in parameters.items():
                self.parameters[name.replace(".default", "")].copy_(value)

    def forward_backward(self, batch: Batch, *, minibatch: int = 0) -> list[Tensor]:
        """Add the gradient of the summed loss; return log-probabilities per datum. ``minibatch`` is ours to choose."""
        found: dict[int, Tensor] = {}
        for micro in self.decoder.plan([datum.tokens for datum in batch.datums]):
            datums: list[Datum] = [batch.datums[index] for index in micro.datums]
            logprobs = self.decoder.micro_batch(
                micro,
                [datum.targets for datum in datums],
                self.parameters,
                self.scale,
                need_grad_positions=[datum.weights != 0 for datum in datums],
            )
            loss_sum(batch.loss, datums, logprobs).backward()
            found.update((i, lp.detach()) for i, lp in zip(micro.datums, logprobs, strict=True))
        return [found[index] for index in range(len(batch.datums))]

    def optim_step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()
