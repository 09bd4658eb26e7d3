"""An adapter in the form the decoder multiplies with: cast once per call, A of modules with the same input stacked.

Suffixes: T rows, I input features, O output features, R summed ranks of a group.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer import many
from trainer.decoder.weights import Projection, Weights

_NAME = re.compile(r"(?:base_model\.model\.)?(?P<path>.+?)\.lora_(?P<side>[AB])(?:\.\w+)*")
_TOGETHER = 64  # summed ranks up to which one product with zeros in between is cheaper than one product per module


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Where one module's LoRA lies: columns ``inner`` of the group's inner rows, columns ``outer`` of its outputs."""

    names: tuple[str, str]
    inner: slice
    outer: slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """B times the scale, of one module or, with zeros elsewhere, of several: ``y[:, outer] += z[:, inner] B^T``."""

    B_OR: Tensor
    inner: slice
    outer: slice
    pairs: tuple[Pair, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """LoRA of modules that read the same rows: ``y += (x A^T) B^T``. May be empty."""

    A_RI: Tensor | None
    blocks: tuple[Block, ...]

    def inner(self, x_TI: Tensor) -> Tensor | None:
        """Return ``x A^T`` [T, R]."""
        return None if self.A_RI is None else _thin(x_TI, self.A_RI)

    def term(self, z_TR: Tensor | None, out_TO: Tensor) -> bool:
        """Write the LoRA terms of all outputs into ``out_TO``; False, and nothing is written, where there are none."""
        if z_TR is None:
            return False
        for block in self.blocks:
            torch.mm(z_TR[:, block.inner], block.B_OR.t(), out=out_TO[:, block.outer])
        return True

    def add(self, z_TR: Tensor, out_TO: Tensor) -> None:
        """Add the LoRA terms of all outputs to ``out_TO``."""
        for block in self.blocks:
            out_TO[:, block.outer] += torch.mm(z_TR[:, block.inner], block.B_OR.t())

    def inner_gradient(self, dy_TO: Tensor) -> Tensor | None:
        """Return the gradient [T, R] of ``inner``, given that of the outputs."""
        if self.A_RI is None:
            return None
        parts = [_thin(dy_TO[:, block.outer], block.B_OR.t()) for block in self.blocks]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def collect(
        self, x_TI: Tensor, z_TR: Tensor | None, dz_TR: Tensor | None, dy_TO: Tensor, sink: "Gradients"
    ) -> None:
        """Give ``sink`` the gradients of every A and B of the group."""
        if z_TR is None or dz_TR is None:
            return
        dA_RI = torch.mm(dz_TR.t(), x_TI)
        for block in self.blocks:
            dB_RO = torch.mm(z_TR[:, block.inner].t(), dy_TO[:, block.outer])
            for pair in block.pairs:
                own = dB_RO[_within(pair.inner, block.inner), _within(pair.outer, block.outer)]
                sink.put(pair.names, dA_RI[pair.inner], own.t())


@dataclass(slots=True, kw_only=True)
class Gradients:
    """Gradients by master name, in any dtype. B is stored times ``scale``, so its gradient is multiplied once more."""

    scale: float
    _by_name: dict[str, Tensor] = field(default_factory=dict)
    _of_B: list[str] = field(default_factory=list)

    def put(self, names: tuple[str, str], dA: Tensor, dB: Tensor) -> None:
        self._by_name[names[0]], self._by_name[names[1]] = dA, dB
        self._of_B.append(names[1])

    def take(self, names: Sequence[str]) -> list[Tensor]:
        """Return them in this order, float32."""
        found = [self._by_name[name] for name in names]
        wide = {name: each.new_empty(each.shape, dtype=torch.float32) for name, each in zip(names, found, strict=True)}
        many.copy_(list(wide.values()), found)
        many.scale_([wide[name] for name in self._of_B], self.scale)
        return list(wide.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLora:
    """The four groups of a layer."""

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
    arranged = _Arranged(lora)
    layers = tuple(
        LayerLora(
            qkv=arranged.group(layer.qkv, dtype),
            o=arranged.group(layer.o, dtype),
            gate_up=arranged.group(layer.gate_up, dtype),
            down=arranged.group(layer.down, dtype),
        )
        for layer in weights.layers
    )
    head = arranged.group(weights.head, torch.float32)
    arranged.fill(scale)
    return Adapter(layers=layers, head=head)


class _Arranged:
    """Places for masters, filled together at the end."""

    def __init__(self, lora: Mapping[str, Tensor]) -> None:
        self._lora = {name: master.detach() for name, master in lora.items()}
        self._left: dict[str, dict[str, str]] = {}
        for name in lora:
            match = _NAME.fullmatch(name)
            if match is None:
                raise ValueError(f"{name} is not the name of a LoRA tensor")
            self._left.setdefault(match["path"], {})[match["side"]] = name
        self._A: list[tuple[Tensor, Tensor]] = []  # target and source
        self._B: list[tuple[Tensor, Tensor]] = []

    def group(self, projection: Projection, dtype: torch.dtype) -> Group:
        pairs = tuple(self._pairs(projection))
        if not pairs:
            return Group(A_RI=None, blocks=())
        rank, weight = pairs[-1].inner.stop, projection.weight
        A_RI = weight.new_empty((rank, weight.shape[1]), dtype=dtype)
        if len(pairs) == len(projection.paths) and rank > _TOGETHER:
            parts = [((pair,), pair.inner, pair.outer) for pair in pairs]
        else:
            parts = [(pairs, slice(0, rank), slice(0, len(weight)))]
        blocks: list[Block] = []
        for members, inner, outer in parts:
            B_OR = weight.new_zeros((outer.stop - outer.start, inner.stop - inner.start), dtype=dtype)
            blocks.append(Block(B_OR=B_OR, inner=inner, outer=outer, pairs=members))
            for pair in members:
                self._A.append((A_RI[pair.inner], self._lora[pair.names[0]]))
                own = B_OR[_within(pair.outer, outer), _within(pair.inner, inner)]
                self._B.append((own, self._lora[pair.names[1]]))
        return Group(A_RI=A_RI, blocks=tuple(blocks))

    def fill(self, scale: float) -> None:
        if self._left:
            raise ValueError(f"the base model has no linear layer {next(iter(self._left))} that LoRA could train")
        many.copy_([target for target, _ in self._A], [source for _, source in self._A])
        many.copy_([target for target, _ in self._B], many.times([source for _, source in self._B], scale))

    def _pairs(self, projection: Projection) -> Iterator[Pair]:
        begin = row = 0
        for path, width in zip(projection.paths, projection.widths, strict=True):
            outer = slice(row, row + width)
            row += width
            names = self._left.pop(path, None)
            if names is None:
                continue
            if len(names) != 2:
                raise ValueError(f"{path} has lora_A or lora_B, but not both")
            A, B = self._lora[names["A"]], self._lora[names["B"]]
            if A.shape[1:] != projection.weight.shape[1:] or B.shape != (width, A.shape[0]):
                raise ValueError(f"{path}: lora_A {list(A.shape)} and lora_B {list(B.shape)} do not fit")
            yield Pair(names=(names["A"], names["B"]), inner=slice(begin, begin + A.shape[0]), outer=outer)
            begin += A.shape[0]


def _within(part: slice, whole: slice) -> slice:
    return slice(part.start - whole.start, part.stop - whole.start)


def _thin(x: Tensor, W: Tensor) -> Tensor:
    """Return ``x W^T``.

    In float32 on the CPU the transposed product is computed: for ranks below 16 it is about three times as fast.
    """
    if x.dtype == torch.float32 and x.device.type == "cpu":
        return torch.mm(W, x.t()).t()
    return torch.mm(x, W.t())
