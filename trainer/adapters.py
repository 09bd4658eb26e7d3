"""LoRA adapters of many sessions on one base model: attach, activate, detach. Nothing else touches PEFT's layers.

PEFT wraps the base for an adapter when the plain way first computes with it: the lean decoder reads tensors alone, and
a session that it serves is attached and detached in no time. An adapter's tensors are float32 masters on the base's
device, whatever the base computes in. Names are ``<module path>.lora_A`` (``[rank, in]``) and ``<module path>.lora_B``
(``[out, rank]``), module paths as in the base model.
"""

import hashlib
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gateway.core.adapter_modules import ATTENTION, MLP
from gateway.core.errors import Invalid
from gateway.core.sessions import LoraConfig
from trainer.language_model import LanguageModel
from trainer.logprobs import Head

if TYPE_CHECKING:  # imported where it is needed: a trainer that restarts mostly goes on without
    from peft.tuners.lora import LoraLayer, LoraModel


class AdapterBank:
    """Adapters by name on a base model, one active at a time, or none.

    Outside ``active`` all masters want gradients.
    """

    def __init__(self, base: LanguageModel) -> None:
        self._model = base.module
        self._device = base.device
        self.head_path = base.head_path
        self._tuner: LoraModel | None = None
        self._tensors: dict[str, dict[str, nn.Parameter]] = {}
        self._configs: dict[str, LoraConfig] = {}
        self._wrapped: set[str] = set()
        self._shapes = {
            path: (module.out_features, module.in_features)
            for path, module in base.modules().items()
            if isinstance(module, nn.Linear)
        }

    def targets(self, lora: LoraConfig) -> dict[str, tuple[int, int]]:
        """Return the modules that ``lora`` trains, path to (out, in).

        Raises:
            Invalid: ``unsupported_target``: a switch is on and the base has no such module.
        """
        body = [path for path in self._shapes if path != self.head_path]
        asked = {
            "train_attn": [path for path in body if path.rpartition(".")[2] in ATTENTION] if lora.train_attn else None,
            "train_mlp": [path for path in body if path.rpartition(".")[2] in MLP] if lora.train_mlp else None,
            "train_unembed": [self.head_path] if lora.train_unembed else None,
        }
        chosen: set[str] = set()
        for switch, found in asked.items():
            if found is None:
                continue
            if not found:
                raise Invalid(
                    f"{switch} is on, but the base model has no such layer to train",
                    code="unsupported_target",
                    field=f"lora.{switch}",
                )
            chosen.update(found)
        return {path: shape for path, shape in self._shapes.items() if path in chosen}

    def attach(self, name: str, lora: LoraConfig, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Add an adapter: fresh from the config's seed, or with the values of ``tensors``."""
        targets = self.targets(lora)
        values = initial_tensors(lora, targets) if tensors is None else tensors
        names = [f"{path}.{side}" for path in targets for side in ("lora_A", "lora_B")]
        self._tensors[name] = {
            each: nn.Parameter(values[each].to(self._device, torch.float32, copy=True).contiguous()) for each in names
        }
        self._configs[name] = lora

    def detach(self, name: str) -> None:
        """Remove an adapter and free its tensors."""
        del self._tensors[name], self._configs[name]
        if self._tuner is not None and name in self._wrapped:
            self._wrapped.remove(name)
            self._tuner.delete_adapter(name)

    def tensors(self, name: str) -> dict[str, nn.Parameter]:
        """Return the adapter's masters in a fixed order."""
        return self._tensors[name]

    @contextmanager
    def active(self, name: str | None) -> Iterator[None]:
        """Let the base module compute with this adapter alone, or (None) as it is, inside the block."""
        if name is not None and name not in self._wrapped:
            self._wrap(name)
        for layer in self._layers():
            layer.enable_adapters(enabled=name is not None)
            if name is not None:
                layer.set_adapter([name])
        try:
            yield
        finally:
            for layer in self._layers():
                layer.enable_adapters(enabled=False)
                layer.set_adapter([])
            for tensors in self._tensors.values():
                for master in tensors.values():
                    master.requires_grad_()  # PEFT switches off those of adapters that are not active

    def scale(self, name: str | None) -> float:
        """Return what multiplies the adapter's product of B and A; 1 for the base model."""
        return 1.0 if name is None else self._configs[name].scale

    def head(self, name: str | None) -> Head:
        """Return the unembedding as adapter ``name`` has it."""
        module: Any = self._model.get_submodule(self.head_path)
        base: Any = module.get_base_layer() if hasattr(module, "get_base_layer") else module
        A = f"{self.head_path}.lora_A"
        if name is None or A not in self._tensors[name]:
            return Head(weight_VH=base.weight, bias_V=base.bias)
        return Head(
            weight_VH=base.weight,
            bias_V=base.bias,
            A_RH=self._tensors[name][A],
            B_VR=self._tensors[name][f"{self.head_path}.lora_B"],
            scale=self._configs[name].scale,
        )

    def _wrap(self, name: str) -> None:
        """Make PEFT's layers for an adapter, on the masters that it has."""
        from peft import LoraConfig as PeftLoraConfig
        from peft.tuners.lora import LoraModel

        lora, tensors = self._configs[name], self._tensors[name]
        targets = self.targets(lora)
        alpha: Any = lora.alpha  # PEFT only divides it
        config = PeftLoraConfig(
            r=lora.rank,
            lora_alpha=alpha,
            use_rslora=lora.use_rslora,
            target_modules=list(targets),
            init_lora_weights=False,
        )
        # PEFT draws first values that ours replace: not from the generator of the process.
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # Tied embeddings: only the head's own LoRA tensors are ever saved, and the base is never merged in place.
            warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
            if self._tuner is None:
                self._tuner = LoraModel(self._model, {name: config}, name)
            else:
                self._tuner.peft_config[name] = config
                self._tuner.inject_adapter(self._model, name)
        self._wrapped.add(name)
        for path in targets:
            layer = self._model.get_submodule(path)
            for side in ("lora_A", "lora_B"):
                getattr(layer, side)[name].weight = tensors[f"{path}.{side}"]

    def _layers(self) -> "Iterator[LoraLayer]":
        if self._tuner is None:
            return iter(())
        from peft.tuners.lora import LoraLayer

        return (module for module in self._model.modules() if isinstance(module, LoraLayer))


def initial_tensors(lora: LoraConfig, targets: Mapping[str, tuple[int, int]]) -> dict[str, Tensor]:
    """Return the tensors of a new adapter: B zero, A uniform in +-1/sqrt(in).

    Every A has its own generator, seeded by the session's seed and its module path: the values depend on nothing else.
    """
    values: dict[str, Tensor] = {}
    for path, (out_features, in_features) in targets.items():
        seed = int.from_bytes(hashlib.sha256(f"{lora.seed}:{path}".encode()).digest()[:8], "big") >> 1
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand((lora.rank, in_features), generator=generator)
        values[f"{path}.lora_A"] = (uniform * 2 - 1) / math.sqrt(in_features)
        values[f"{path}.lora_B"] = torch.zeros((out_features, lora.rank))
    return values
