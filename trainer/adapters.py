"""LoRA adapters of many sessions on one base model: attach, activate, detach. Nothing else touches PEFT's layers.

An adapter's tensors are float32 masters on the base's device, whatever the base computes in. Names are
``<module path>.lora_A`` (``[rank, in]``) and ``<module path>.lora_B`` (``[out, rank]``), module paths as in the base
model.
"""

import hashlib
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from peft import LoraConfig as PeftLoraConfig
from peft.tuners.lora import LoraLayer, LoraModel
from torch import Tensor, nn

from gateway.core.errors import Invalid
from gateway.core.sessions import LoraConfig
from trainer.logprobs import Head

ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"})
MLP = frozenset({"gate_proj", "up_proj", "down_proj", "gate_up_proj"})


class AdapterBank:
    """Adapters by name on ``model`` (a transformers causal language model), one active at a time, or none."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tuner: LoraModel | None = None
        self._tensors: dict[str, dict[str, nn.Parameter]] = {}
        head = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
        self._shapes = {path: (m.out_features, m.in_features) for path, m in _linears(model)}
        embedding = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
        self.head_path = next(path for path, module in model.named_modules() if module is head)
        self.embedding_path = next(path for path, module in model.named_modules() if module is embedding)
        self.head_tied = head.weight is embedding.weight

    def targets(self, lora: LoraConfig) -> dict[str, tuple[int, int]]:
        """Return the modules that ``lora`` trains, path to (out, in).

        Raises:
            Invalid: ``unsupported_target``: a switch is on and the base has no such module.
        """
        chosen: dict[str, tuple[int, int]] = {}
        for switch, names in (("train_attn", ATTENTION), ("train_mlp", MLP), ("train_unembed", {self.head_path})):
            if not getattr(lora, switch):
                continue
            found = {p: s for p, s in self._shapes.items() if p == self.head_path or p.rpartition(".")[2] in names}
            found = {p: s for p, s in found.items() if (p == self.head_path) == (switch == "train_unembed")}
            if not found:
                raise Invalid(
                    f"{switch} is on, but the base model has no such layer to train",
                    code="unsupported_target",
                    field=f"lora.{switch}",
                )
            chosen.update(found)
        return {path: chosen[path] for path in self._shapes if path in chosen}

    def attach(self, name: str, lora: LoraConfig, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Add an adapter: fresh from the config's seed, or with the values of ``tensors``."""
        targets = self.targets(lora)
        config = PeftLoraConfig(
            r=lora.rank, lora_alpha=lora.alpha, target_modules=list(targets), init_lora_weights=False
        )  # pyright: ignore[reportArgumentType]
        with warnings.catch_warnings():
            # Tied embeddings: only the head's own LoRA tensors are ever saved, and the base is never merged in place.
            warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
            if self._tuner is None:
                self._tuner = LoraModel(self._model, {name: config}, name)
            else:
                self._tuner.peft_config[name] = config
                self._tuner.inject_adapter(self._model, name)
        values = initial_tensors(lora, targets) if tensors is None else tensors
        parameters: dict[str, nn.Parameter] = {}
        for path in targets:
            layer = self._model.get_submodule(path)
            for side in ("lora_A", "lora_B"):
                linear = getattr(layer, side)[name]
                value = values[f"{path}.{side}"].to(linear.weight.device, torch.float32, copy=True)
                linear.weight = parameters[f"{path}.{side}"] = nn.Parameter(value.contiguous())
        self._tensors[name] = parameters

    def detach(self, name: str) -> None:
        """Remove an adapter and free its tensors."""
        del self._tensors[name]
        if self._tuner is not None:
            self._tuner.delete_adapter(name)

    def tensors(self, name: str) -> dict[str, nn.Parameter]:
        """Return the adapter's masters in a fixed order."""
        return self._tensors[name]

    @contextmanager
    def active(self, name: str | None) -> Iterator[None]:
        """Compute with this adapter alone, or (None) with the bare base model, inside the block."""
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

    def head(self, name: str | None) -> Head:
        """Return the unembedding as adapter ``name`` has it."""
        module = self._model.get_submodule(self.head_path)
        base = module.get_base_layer() if isinstance(module, LoraLayer) else module
        mine = self._tensors.get(name or "", {})
        path = self.head_path
        if f"{path}.lora_A" not in mine:
            return Head(weight_VH=base.weight, bias_V=base.bias)
        return Head(
            weight_VH=base.weight,
            bias_V=base.bias,
            A_RH=mine[f"{path}.lora_A"],
            B_VR=mine[f"{path}.lora_B"],
            scale=module.scaling[name],
        )

    def _layers(self) -> Iterator[LoraLayer]:
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


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield path, module
