"""A causal language model of transformers, as far as the trainer looks into it: the only file that does."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from trainer.decoder import DecoderSettings, LoraDecoder, fused_beyond, supports
from trainer.memory import ModelShape


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

    def shape(self) -> ModelShape:
        """Return what the memory of a pass depends on."""
        config = self._model.config.get_text_config()
        hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
        on_cpu = self._model.device.type == "cpu"
        return ModelShape(
            layers=int(config.num_hidden_layers),
            hidden=hidden,
            intermediate=int(getattr(config, "intermediate_size", None) or 4 * hidden),
            heads=heads,
            head_size=int(getattr(config, "head_dim", None) or hidden // heads),
            element_bytes=self.dtype.itemsize,
            score_keys=fused_beyond(self.dtype) if on_cpu else sys.maxsize,
            quadratic=config._attn_implementation == "eager",
        )

    def hidden(self, tokens_BT: Tensor, *, checkpoint: bool = False) -> Tensor:
        """Return the hidden states ``[B, T, H]`` that the unembedding reads, under whatever adapter is active.

        With ``checkpoint`` each layer keeps only its input for backward and is computed again there: the same bits.
        """
        with self._checkpointing(checkpoint):
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

    @contextmanager
    def _checkpointing(self, wanted: bool) -> Iterator[None]:
        """Wrap the forward of every layer, on the instance, for the length of the block."""
        layers = [m for m in self._model.modules() if isinstance(m, GradientCheckpointingLayer)] if wanted else []
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward

    def _path(self, wanted: nn.Module) -> str:
        return next(path for path, module in self.modules().items() if module is wanted)
