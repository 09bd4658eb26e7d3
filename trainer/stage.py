"""Adapters as engines load them: a standard PEFT directory, written and then checked by reading it back.

Engines multiply by ``lora_alpha / r`` in their own dtype. A scale that is a power of two is exact there and stays in
the config; any other is multiplied into B in float32 here, before the one cast, and the config says ``lora_alpha = r``.
rsLoRA is an ordinary scale here: the config never asks for it.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gateway.core.adapter_files import BadAdapter as UnfitAdapter
from gateway.core.errors import Internal
from gateway.core.sessions import LoraConfig
from trainer.tensorfiles import open_tensors, write_tensors

CONFIG_NAME = "adapter_config.json"
ADAPTER_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."


class BadAdapter(Internal):
    """A written adapter is not what engines can load; the text says what is wrong."""

    default_code = "incomplete_adapter"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedAdapter:
    """Tensors in the engine's dtype (names as in ``adapters``) and the config that goes with them."""

    rank: int
    alpha: float
    tensors: Mapping[str, Tensor]
    use_rslora: bool = False

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


def export(masters: Mapping[str, Tensor], lora: LoraConfig, dtype: torch.dtype) -> ExportedAdapter:
    """Cast float32 masters to ``dtype``, once, folding the scale into B when engines could not apply it exactly."""
    scale = lora.scale
    exact = math.frexp(scale)[0] == 0.5 and (scale * lora.rank).is_integer()
    tensors: dict[str, Tensor] = {}
    for name, master in masters.items():
        value = master.detach()
        if name.endswith(".lora_B") and not exact:
            value = value * scale
        tensors[name] = value.to("cpu", dtype, copy=True).contiguous()
    return ExportedAdapter(rank=lora.rank, alpha=int(scale * lora.rank) if exact else lora.rank, tensors=tensors)


def write_adapter(directory: Path, adapter: ExportedAdapter, base_model: str) -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors``."""
    from peft import LoraConfig as PeftLoraConfig

    paths = list(dict.fromkeys(name.rpartition(".")[0] for name in adapter.tensors))
    alpha: Any = adapter.alpha  # PEFT only divides it
    config = PeftLoraConfig(
        r=adapter.rank,
        lora_alpha=alpha,
        target_modules=sorted({path.rpartition(".")[2] for path in paths}),
        base_model_name_or_path=base_model,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    config.save_pretrained(str(directory))
    _rewrite_sorted(directory / CONFIG_NAME)
    write_tensors(
        directory / ADAPTER_NAME, {f"{_PREFIX}{name}.weight": tensor for name, tensor in adapter.tensors.items()}
    )


def _rewrite_sorted(path: Path) -> None:
    """Make equal configs equal bytes: PEFT writes its target set in hash order."""
    config: dict[str, Any] = json.loads(path.read_bytes())
    config["target_modules"] = sorted(config["target_modules"])
    path.write_text(json.dumps(config, indent=2, sort_keys=True))


def read_adapter(directory: Path) -> ExportedAdapter:
    """Read what ``write_adapter`` wrote, or PEFT did."""
    config: dict[str, Any] = json.loads((directory / CONFIG_NAME).read_bytes())
    with open_tensors(directory / ADAPTER_NAME) as file:
        tensors = {
            name.removeprefix(_PREFIX).removesuffix(".weight"): file.tensor(name).contiguous() for name in file.names()
        }
    return ExportedAdapter(
        rank=config["r"], alpha=config["lora_alpha"], tensors=tensors, use_rslora=bool(config.get("use_rslora"))
    )


def masters(adapter: ExportedAdapter, lora: LoraConfig) -> dict[str, Tensor]:
    """Return float32 masters that with the scale of ``lora`` compute what ``adapter`` computes with its own."""
    factor = adapter.scale / lora.scale
    return {
        name: tensor.float() * factor if name.endswith(".lora_B") and factor != 1 else tensor.float()
        for name, tensor in adapter.tensors.items()
    }


def check_modules(tensors: Mapping[str, Tensor], targets: Mapping[str, tuple[int, int]]) -> None:
    """Check an adapter from elsewhere against the modules of the base model (path to out, in); pairs are whole.

    Raises:
        UnfitAdapter: names the module.
    """
    for name, tensor in tensors.items():
        path, _, side = name.rpartition(".")
        if path not in targets:
            raise UnfitAdapter(f"the base model trains no module {path[:200]}", field=path[:200])
        found, wanted = tensor.shape[side == "lora_A"], targets[path][side == "lora_A"]
        if found != wanted:
            what = "inputs" if side == "lora_A" else "outputs"
            raise UnfitAdapter(
                f"{path} has {wanted} {what} in the base model, {found} in the adapter",
                field=path,
                details={"got": found, "expected": wanted},
            )


def validate(directory: Path, targets: Mapping[str, tuple[int, int]], rank: int) -> None:
    """Read a written adapter back and check it against the modules it must adapt (path to out, in).

    Raises:
        BadAdapter: a tensor is missing, unknown, of the wrong shape, or holds a number that is not finite.
    """
    expected: dict[str, tuple[int, int]] = {}
    for path, (out_features, in_features) in targets.items():
        expected[f"{_PREFIX}{path}.lora_A.weight"] = (rank, in_features)
        expected[f"{_PREFIX}{path}.lora_B.weight"] = (out_features, rank)
    with open_tensors(directory / ADAPTER_NAME) as file:
        if wrong := sorted(set(file.names()) ^ expected.keys()):
            raise BadAdapter(f"missing or unknown tensors: {', '.join(wrong[:5])}")
        for name, shape in expected.items():
            tensor = file.tensor(name)
            if tuple(tensor.shape) != shape:
                raise BadAdapter(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
            if not torch.isfinite(tensor).all():
                raise BadAdapter(f"{name} holds a number that is not finite")
