"""The loop a careful user writes by hand: transformers + PEFT + AdamW, right-padded minibatches, full logits.

No attention mask is passed: with padding on the right, causal attention never lets a real position see it.
"""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from tests.bench.batches import LINEAR, Batch, loss_sum


class BareLoop:
    """One LoRA adapter of ``rank`` on all linear layers, in ``dtype``; B starts random so that each gradient counts.

    ``attention`` is transformers' choice: None for its default, the fused ``sdpa``.
    """

    def __init__(
        self, model_path: Path, dtype: torch.dtype, *, rank: int = 8, seed: int = 0, attention: str | None = None
    ) -> None:
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, attn_implementation=attention)
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(LINEAR), init_lora_weights=False)
        self.model: Any = get_peft_model(base, config)
        self.model.train()
        self.parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(self.parameters.values(), lr=1e-5)

    def forward_backward(self, batch: Batch, *, minibatch: int = 16) -> list[Tensor]:
        """Add the gradient of the summed loss; return log-probabilities per datum."""
        return self._run(batch, minibatch, train=True)

    def logprobs(self, batch: Batch, *, minibatch: int = 16) -> list[Tensor]:
        """Return log-probabilities per datum."""
        with torch.no_grad():
            return self._run(batch, minibatch, train=False)

    def calm(self) -> None:
        """Shrink B to the size it has after a few steps of training."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if ".lora_B." in name:
                    parameter.mul_(0.05)

    def masters(self) -> dict[str, Tensor]:
        """Return the adapter's values by the trainer's names."""
        return {_name(name): parameter.detach().float() for name, parameter in self.parameters.items()}

    def gradients(self) -> dict[str, Tensor]:
        """Return the accumulated gradient by the trainer's names, and clear it."""
        found = {_name(name): p.grad.float() for name, p in self.parameters.items() if p.grad is not None}
        self._optimizer.zero_grad()
        return found

    def _run(self, batch: Batch, minibatch: int, *, train: bool) -> list[Tensor]:
        found: list[Tensor] = []
        for start in range(0, len(batch.datums), minibatch):
            datums = batch.datums[start : start + minibatch]
            longest = max(len(datum.tokens) for datum in datums)
            tokens = torch.stack([F.pad(datum.tokens, (0, longest - len(datum.tokens))) for datum in datums])
            targets = torch.stack([F.pad(datum.targets, (0, longest - len(datum.tokens))) for datum in datums])
            logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
            logprobs = -F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
            rows = [row[: len(d.tokens)] for row, d in zip(logprobs.view(targets.shape), datums, strict=True)]
            if train:
                loss_sum(batch.loss, datums, rows).backward()
            found.extend(row.detach() for row in rows)
        return found

    def optim_step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


def _name(parameter: str) -> str:
    return parameter.removeprefix("base_model.model.").removesuffix(".default.weight")
