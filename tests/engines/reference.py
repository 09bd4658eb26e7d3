"""The reference for the real engine: torch and PEFT in float32, and adapters made with them."""

import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load, save
from transformers import AutoModelForCausalLM

from gateway.core.canary import Canary
from gateway.core.versions import Version
from gateway.store.artifacts import LocalArtifacts
from tests.engines.artifacts import make_lora, stage

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
CANARY_TOKENS = ((504, 3575, 282, 4649, 314, 260, 2240, 30, 198, 42, 357, 99, 1000, 45000), (7, 8, 9, 1234, 777))


class Reference:
    """The base model and any number of adapters by version id, all in one PEFT model."""

    def __init__(self, model_path: Path, artifacts: LocalArtifacts, *, base_model: str) -> None:
        base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        self._artifacts = artifacts
        self._base_model = base_model
        self._names: dict[str, str] = {}
        self._model: PeftModel = get_peft_model(base, LoraConfig(r=1, target_modules=["q_proj"]), "unused")

    def adapter(
        self,
        seed: int,
        *,
        rank: int = 8,
        unembed: bool = False,
        strength: float = 0.05,
        spoil: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]] | None = None,
    ) -> Version:
        """Stage a random adapter. ``spoil`` changes the tensors that are written, not the canary."""
        name = f"seed{seed}{'u' if unembed else ''}r{rank}"
        targets = [*PROJECTIONS, *(["lm_head"] if unembed else [])]
        if name not in self._model.peft_config:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PEFT on tied embeddings: they are served, see the unembed tests
                self._model.add_adapter(name, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))
            generator = torch.Generator().manual_seed(seed)
            for parameter_name, parameter in self._model.named_parameters():
                if f".{name}." in parameter_name:
                    parameter.data = torch.randn(parameter.shape, generator=generator) * strength
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._model.save_pretrained(folder, selected_adapters=[name], save_embedding_layers=False)
            files = {file: (Path(folder) / name / file).read_bytes() for file in (WEIGHTS, CONFIG)}
        if spoil is not None:
            files[WEIGHTS] = save({key: tensor.contiguous() for key, tensor in spoil(load(files[WEIGHTS])).items()})
        canary = Canary(
            tokens=CANARY_TOKENS,
            logprobs=tuple(tuple(self.scores(tokens, name)) for tokens in CANARY_TOKENS),
            base_logprobs=tuple(tuple(self.scores(tokens, None)) for tokens in CANARY_TOKENS),
        )
        lora = make_lora(rank=rank, train_unembed=unembed)
        version = stage(self._artifacts, files, canary, base_model=self._base_model, lora=lora)
        self._names[version.id] = name
        return version

    def of(self, version: Version, tokens: Sequence[int]) -> list[float]:
        """Return the log-probabilities of ``tokens[1:]`` under ``version``."""
        return self.scores(tokens, self._names[version.id])

    def scores(self, tokens: Sequence[int], adapter: str | None) -> list[float]:
        logprobs = self._full(tokens, adapter)
        return logprobs[:-1].gather(1, torch.tensor(tokens)[1:, None]).squeeze(1).tolist()

    def full(self, version: Version, tokens: Sequence[int]) -> torch.Tensor:
        """Return all log-probabilities after each of ``tokens``: ``[len(tokens), vocabulary]``, float64."""
        return self._full(tokens, self._names[version.id])

    @torch.inference_mode()
    def _full(self, tokens: Sequence[int], adapter: str | None) -> torch.Tensor:
        ids = torch.tensor([tokens])
        if adapter is None:
            with self._model.disable_adapter():
                logits: Any = self._model(ids).logits
        else:
            self._model.set_adapter(adapter)
            logits = self._model(ids).logits
        return logits[0].double().log_softmax(-1)
