"""The reference of the numerics tests: transformers with full logits, LoRA multiplied into its weights, float64.

So what is compared with it carries the only rounding errors.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from gateway.core.payloads import ForwardBackward, LossFn
from tests.trainer.test_losses import reference
from trainer.batching import to_tensor


class Plain:
    """A frozen base model on the CPU."""

    def __init__(self, path: Path) -> None:
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
        self._model: Any = loaded.eval().requires_grad_(False)

    def logits(self, masters: Mapping[str, Tensor], scale: float, tokens: Tensor) -> Tensor:
        """Return ``[N, V]`` logits under an adapter, differentiable in ``masters``."""
        changed = {
            f"{path}.weight": self._model.get_submodule(path).weight
            + scale * masters[f"{path}.lora_B"].double() @ masters[f"{path}.lora_A"].double()
            for path in {name.rpartition(".")[0] for name in masters}
        }
        return functional_call(self._model, changed, (tokens[None],), {"use_cache": False}, tie_weights=False).logits[0]

    def loss(
        self, payload: ForwardBackward, masters: Mapping[str, Tensor], scale: float
    ) -> tuple[list[Tensor], Tensor]:
        """Return each datum's log-probabilities and the summed loss (float64), differentiable in ``masters``."""
        found: list[Tensor] = []
        for datum in payload.data:
            given = datum.loss_fn_inputs
            default = torch.tensor([payload.loss_fn_config.get("temperature", 1.0)])
            temperature = to_tensor(given["temperature"]) if "temperature" in given else default
            logits = self.logits(masters, scale, to_tensor(datum.model_input)) / temperature[:, None]
            targets = to_tensor(given["target_tokens"])
            found.append(logits.log_softmax(-1).gather(1, targets.reshape(datum.length, -1)).view(targets.shape))
        flat = torch.cat([logprobs.flatten() for logprobs in found])
        inputs = _joined(payload)
        lengths: Sequence[int] = [len(datum.model_input.values()) for datum in payload.data]
        return found, reference(payload.loss_fn, flat, inputs, payload.loss_fn_config, lengths)


def _joined(payload: ForwardBackward) -> dict[str, Tensor]:
    names = set(payload.data[0].loss_fn_inputs) - {"target_tokens", "temperature"}
    if payload.loss_fn is LossFn.CROSS_ENTROPY:
        names = {"weights"}
    return {
        name: torch.cat([to_tensor(datum.loss_fn_inputs[name]).flatten() for datum in payload.data]) for name in names
    }
