"""LoRA products grouped by adapter, at the adapter's own rank.

The stock CPU ops gather a copy of A and B for every token, padded to ``--max-lora-rank``. Here the rows of a step are
grouped by slot once (when the mapping of rows to adapters changes), and each group is two plain matrix products with
views of the slot's weights, cut to the rank the adapter really has. Base rows are in no group.

Dimensions: T rows, I inputs, O outputs, R rank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import torch

_GROUPS = "loopline_groups"  # on the wrapper: the present step's groups
_RANKS = "loopline_ranks"  # on the wrapper: slot -> rank
_APPLIED = "loopline_grouped"  # on the wrapper's class


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rows of one slot: a slice when they are adjacent, else their numbers."""

    slot: int
    rows: slice | torch.Tensor


def groups_of(indices_T: torch.Tensor) -> tuple[Group, ...]:
    """Group rows by slot; rows of index -1 are left out."""
    groups: list[Group] = []
    for slot in range(int(indices_T.max()) + 1 if indices_T.numel() else 0):
        rows = torch.eq(indices_T, slot).nonzero().squeeze(1)
        if rows.numel() == 0:
            continue
        first, last = int(rows[0]), int(rows[-1])
        adjacent = last - first + 1 == rows.numel()
        groups.append(Group(slot=slot, rows=slice(first, last + 1) if adjacent else rows))
    return tuple(groups)


def add_products(
    y_TO: torch.Tensor,
    x_TI: torch.Tensor,
    a_stacked: Sequence[torch.Tensor],
    b_stacked: Sequence[torch.Tensor],
    scale: float,
    output_slices: Sequence[int],
    groups: Sequence[Group],
    ranks: Mapping[int, int],
) -> None:
    """Add ``scale * x A^T B^T`` to each output slice of ``y``, in place.

    ``a_stacked[s]`` is ``[slots, 1, R, I]`` and ``b_stacked[s]`` ``[slots, 1, O, R]``; a slot missing in ``ranks``
    is computed at the full padded rank. An output narrower than its B takes B's first rows.
    """
    for group in groups:
        x = x_TI[group.rows]
        y = y_TO[group.rows]
        start = 0
        for a_all, b_all, width in zip(a_stacked, b_stacked, output_slices, strict=True):
            rank = ranks.get(group.slot, a_all.shape[-2])
            a_RI = a_all[group.slot].reshape(a_all.shape[-2:])[:rank]
            columns = min(width, y.shape[1] - start)
            b_OR = b_all[group.slot].reshape(b_all.shape[-2:])[:columns, :rank]
            h_TR = x.to(a_RI.dtype) @ a_RI.T
            if scale != 1.0:
                h_TR = h_TR * scale
            y[:, start : start + columns] += (h_TR @ b_OR.T).to(y.dtype)
            start += width
        if isinstance(group.rows, torch.Tensor):
            y_TO.index_copy_(0, group.rows, y)


def add_expansion(
    y_TO: torch.Tensor,
    x_TR: torch.Tensor,
    b_stacked: torch.Tensor,
    groups: Sequence[Group],
    ranks: Mapping[int, int],
) -> None:
    """Add ``x B^T`` to ``y``, in place: the second half of ``add_products``, for embeddings."""
    for group in groups:
        y = y_TO[group.rows]
        rank = ranks.get(group.slot, x_TR.shape[1])
        b_OR = b_stacked[group.slot].reshape(b_stacked.shape[-2:])[:, :rank]
        y += (x_TR[group.rows][:, :rank].to(b_OR.dtype) @ b_OR.T).to(y.dtype)
        if isinstance(group.rows, torch.Tensor):
            y_TO.index_copy_(0, group.rows, y)


def group_by_adapter() -> None:
    """Replace the products of the CPU wrapper and record ranks where the manager fills a slot. Applying it twice is
    applying it once."""
    wrapper_class = import_module("vllm.lora.punica_wrapper.punica_cpu").PunicaWrapperCPU
    manager_class = import_module("vllm.lora.model_manager").LoRAModelManager
    if hasattr(wrapper_class, _APPLIED):
        return
    stock_update: Callable[..., None] = wrapper_class.update_metadata
    stock_linear: Callable[..., None] = wrapper_class.add_lora_linear
    stock_logits: Callable[..., None] = wrapper_class.add_lora_logits
    stock_embedding: Callable[..., None] = wrapper_class.add_lora_embedding
    stock_activate: Callable[..., bool] = manager_class.activate_adapter

    def update_metadata(self: Any, *args: Any, **options: Any) -> None:
        stock_update(self, *args, **options)
        setattr(self, _GROUPS, groups_of(self.token_lora_indices))

    def add_lora_linear(
        self: Any,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[torch.Tensor, ...] | None = None,
        **options: Any,
    ) -> None:
        groups: tuple[Group, ...] | None = getattr(self, _GROUPS, None)
        if buffer is not None or groups is None:
            stock_linear(self, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, buffer=buffer, **options)
            return
        ranks: Mapping[int, int] = getattr(self, _RANKS, {})
        add_products(
            y.view(-1, y.shape[-1]),
            x.view(-1, x.shape[-1]),
            lora_a_stacked,
            lora_b_stacked,
            scale,
            output_slices,
            groups,
            ranks,
        )

    def add_lora_logits(
        self: Any,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: torch.Tensor | None = None,
        **options: Any,
    ) -> None:
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        indices = self.sampler_indices
        if buffer is not None or indices.shape[0] != x.shape[0]:
            stock_logits(self, y, x, lora_a_stacked, lora_b_stacked, scale, buffer=buffer, **options)
            return
        ranks: Mapping[int, int] = getattr(self, _RANKS, {})
        widths = (lora_b_stacked.shape[-2],)
        add_products(y, x, (lora_a_stacked,), (lora_b_stacked,), scale, widths, groups_of(indices), ranks)

    def add_lora_embedding(
        self: Any,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        add_inputs: bool = True,
        **options: Any,
    ) -> None:
        groups: tuple[Group, ...] | None = getattr(self, _GROUPS, None)
        if not add_inputs or groups is None:
            stock_embedding(self, y, x, lora_b_stacked, add_inputs, **options)
            return
        add_expansion(y, x, lora_b_stacked, groups, getattr(self, _RANKS, {}))

    def activate_adapter(self: Any, lora_id: int) -> bool:
        activated = stock_activate(self, lora_id)
        if activated:
            slot = self.lora_index_to_id.index(lora_id)
            rank = rank_of(self._registered_adapters[lora_id])
            for wrapper in self.punica_wrapper_mapping.values():
                if not hasattr(wrapper, _RANKS):
                    setattr(wrapper, _RANKS, {})
                getattr(wrapper, _RANKS)[slot] = rank
        return activated

    wrapper_class.update_metadata = update_metadata
    wrapper_class.add_lora_linear = add_lora_linear
    wrapper_class.add_lora_logits = add_lora_logits
    wrapper_class.add_lora_embedding = add_lora_embedding
    manager_class.activate_adapter = activate_adapter
    setattr(wrapper_class, _APPLIED, True)


def rank_of(lora_model: Any) -> int:
    """Return the largest rank among the adapter's modules (they differ under a rank pattern)."""
    ranks: list[int] = []
    for weights in lora_model.loras.values():
        packed: Any = weights.lora_a  # a list where one module packs several projections; None for those without
        parts = cast("Sequence[Any]", packed if isinstance(packed, list) else (packed,))
        ranks += [part.shape[0] for part in parts if part is not None]
    return max(ranks, default=0)
