"""A causal language model of transformers, as far as the trainer looks into it: the only file that does."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from trainer.decoder import DecoderSettings, LoraDecoder, supports


class LanguageModel:
    """A frozen model in evaluation mode. ``tied``: the unembedding shares its weight with the embedding."""

    def __init__(self, path: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        self._model: Any = loaded.to(device).eval().requires_grad_(False)
        self.module: nn.Module = self._model
        self.dtype = dtype
        self.device = device
        head, embedding = self._model.get_output_embeddings(), self._model.get_input_embeddings()
        self.head_path = self._path(head)
        self.embedding_path = self._path(embedding)
        self.tied: bool = head.weight is embedding.weight

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """Return the hidden states ``[B, T, H]`` that the unembedding reads, under whatever adapter is active."""
        return self._model.base_model(input_ids=tokens_BT, use_cache=False).last_hidden_state

    def decoder(self, dtype: torch.dtype, settings: DecoderSettings) -> LoraDecoder | None:
        """Return the lean decoder of this model, or None where it would not compute the same."""
        if not supports(self._model.config) or self._model.get_output_embeddings().bias is not None:
            return None
        return LoraDecoder(self._model, compute_dtype=dtype, settings=settings)

    def logits(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits ``[B, T, V]`` as transformers computes them."""
        return self._model(input_ids=tokens_BT, use_cache=False).logits

    def modules(self) -> dict[str, nn.Module]:
        """Return every module by path."""
        return dict(self._model.named_modules())

    def _path(self, wanted: nn.Module) -> str:
        return next(path for path, module in self.modules().items() if module is wanted)
