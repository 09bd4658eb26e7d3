"""An adapter in the form the decoder multiplies with: cast once per call, A of modules with the same input stacked.

Suffixes: T rows, I input features, O output features, R summed ranks of a group.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.decoder.weights import Projection, Weights

_NAME = re.compile(r"(?:base_model\.model\.)?(?P<path>.+?)\.lora_(?P<side>[AB])(?:\.\w+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """LoRA of output ``index`` of a group: B [O, rank] times the scale, columns ``[begin, end)`` of the inner rows."""

    index: int
    B: Tensor
    begin: int
    end: int
    names: tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """LoRA of modules that read the same rows: ``y_i += (x A^T)[:, begin:end] B_i^T``. May be empty."""

    A_RI: Tensor | None
    pairs: tuple[Pair, ...]

    def inner(self, x_TI: Tensor) -> Tensor | None:
        """Return ``x A^T`` [T, R]."""
        return None if self.A_RI is None else _thin([(x_TI, self.A_RI)])

    def term(self, index: int, z_TR: Tensor | None, out_TO: Tensor) -> bool:
        """Write the LoRA term of output ``index`` into ``out_TO``; False, and nothing is written, where it has none."""
        for pair in self.pairs:
            if pair.index == index and z_TR is not None:
                torch.mm(z_TR[:, pair.begin : pair.end], pair.B.t(), out=out_TO)
                return True
        return False

    def inner_gradient(self, gradients: Sequence[Tensor]) -> Tensor | None:
        """Return the gradient [T, R] of ``inner``, given those of the outputs."""
        if self.A_RI is None:
            return None
        return _thin([(gradients[pair.index], pair.B.t()) for pair in self.pairs])

    def collect(
        self, x_TI: Tensor, z_TR: Tensor | None, dz_TR: Tensor | None, gradients: Sequence[Tensor], sink: "Gradients"
    ) -> None:
        """Give ``sink`` the gradients of every A and B of the group."""
        if z_TR is None or dz_TR is None:
            return
        dA_RI = torch.mm(dz_TR.t(), x_TI)
        for pair in self.pairs:
            sink.put(pair.names[0], dA_RI[pair.begin : pair.end], 1.0)
            dB_RO = torch.mm(z_TR[:, pair.begin : pair.end].t(), gradients[pair.index])
            sink.put(pair.names[1], dB_RO.t(), sink.scale)


@dataclass(slots=True, kw_only=True)
class Gradients:
    """Float32 gradients by master name. B is stored times ``scale``, so its gradient is multiplied once more."""

    scale: float
    by_name: dict[str, Tensor] = field(default_factory=dict)

    def put(self, name: str, value: Tensor, factor: float) -> None:
        value = value.to(torch.float32).contiguous()
        self.by_name[name] = value if factor == 1.0 else value * factor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLora:
    """The four groups of a layer: outputs (q, k, v), (o), (gate, up), (down)."""

    qkv: Group
    o: Group
    gate_up: Group
    down: Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """All groups of one adapter; the head's tensors stay float32."""

    layers: tuple[LayerLora, ...]
    head: Group


def cast(lora: Mapping[str, Tensor], weights: Weights, scale: float, dtype: torch.dtype) -> Adapter:
    """Arrange masters named as PEFT names them (with or without its prefix and suffixes).

    Raises:
        ValueError: a name is no LoRA tensor of this base, a partner is missing, or a shape does not fit.
    """
    found: dict[str, dict[str, str]] = {}
    for name in lora:
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"{name} is not the name of a LoRA tensor")
        found.setdefault(match["path"], {})[match["side"]] = name

    def group(projections: Sequence[Projection], dtype: torch.dtype) -> Group:
        stacked: list[Tensor] = []
        pairs: list[Pair] = []
        begin = 0
        for index, projection in enumerate(projections):
            names = found.pop(projection.path, None)
            if names is None:
                continue
            if len(names) != 2:
                raise ValueError(f"{projection.path} has lora_A or lora_B, but not both")
            A, B = lora[names["A"]].detach(), lora[names["B"]].detach()
            if A.shape[1:] != projection.weight.shape[1:] or B.shape != (projection.weight.shape[0], A.shape[0]):
                raise ValueError(f"{projection.path}: lora_A {list(A.shape)} and lora_B {list(B.shape)} do not fit")
            end = begin + A.shape[0]
            stacked.append(A.to(dtype))
            scaled = (B * scale if scale != 1.0 else B).to(dtype)
            pairs.append(Pair(index=index, B=scaled, begin=begin, end=end, names=(names["A"], names["B"])))
            begin = end
        return Group(A_RI=torch.cat(stacked) if stacked else None, pairs=tuple(pairs))

    layers = tuple(
        LayerLora(
            qkv=group((layer.q, layer.k, layer.v), dtype),
            o=group((layer.o,), dtype),
            gate_up=group((layer.gate, layer.up), dtype),
            down=group((layer.down,), dtype),
        )
        for layer in weights.layers
    )
    head = group((weights.head,), torch.float32)
    if found:
        raise ValueError(f"the base model has no linear layer {next(iter(found))} that LoRA could train")
    return Adapter(layers=layers, head=head)


def _thin(products: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return ``x W^T`` of every (x, W) side by side.

    In float32 on the CPU the transposed product is computed: for ranks below 16 it is about three times as fast.
    """
    x, _ = products[0]
    if x.dtype == torch.float32 and x.device.type == "cpu":
        return torch.cat([torch.mm(weight, rows.t()) for rows, weight in products]).t()
    return torch.cat([torch.mm(rows, weight.t()) for rows, weight in products], dim=1)
