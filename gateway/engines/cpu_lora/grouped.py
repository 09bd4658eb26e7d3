"""LoRA products grouped by adapter, at the adapter's own rank.

The stock CPU ops gather a copy of A and B for every token, padded to ``--max-lora-rank``. Here the rows of a step are
grouped by slot once (when the mapping of rows to adapters changes), and each group is two plain matrix products, cut to
the rank the adapter really has. Base rows are in no group.

At decoding sizes a product costs its call (some 20 us), not its arithmetic: so the A of a module's slices (q, k, v) are
laid one under the other and their B block by block, once for each adapter that enters a slot.

Dimensions: T rows, I inputs, O outputs, R rank, summed over a module's slices.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import torch

_GROUPS = "loopline_groups"  # on the wrapper: the present step's groups
_RANKS = "loopline_ranks"  # on the wrapper: slot -> rank
_PACKS = "loopline_packs"  # on the wrapper: (slot, address of the module's A) -> pack
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """One adapter in one module: A of all slices, and B with a block for each. ``source`` keeps the address taken."""

    A_RI: torch.Tensor
    B_RO: torch.Tensor
    source: torch.Tensor


def pack(
    a_stacked: Sequence[torch.Tensor], b_stacked: Sequence[torch.Tensor], widths: Sequence[int], slot: int, rank: int
) -> Pack:
    """Copy a slot's weights at their own rank.

    ``a_stacked[s]`` is ``[slots, 1, R, I]`` and ``b_stacked[s]`` ``[slots, 1, O, R]``; slices of the output are
    ``widths`` wide, and one narrower than its B takes B's first rows.
    """
    A_RI = torch.cat([a[slot].reshape(a.shape[-2:])[:rank] for a in a_stacked])
    B_RO = A_RI.new_zeros((A_RI.shape[0], sum(widths)))
    start = 0
    for index, (b, width) in enumerate(zip(b_stacked, widths, strict=True)):
        own_OR = b[slot].reshape(b.shape[-2:])[:width, :rank]
        B_RO[index * rank : (index + 1) * rank, start : start + own_OR.shape[0]] = own_OR.T
        start += width
    return Pack(A_RI=A_RI, B_RO=B_RO, source=a_stacked[0])


def add_products(
    y_TO: torch.Tensor, x_TI: torch.Tensor, scale: float, groups: Sequence[Group], pack_of: Callable[[int], Pack]
) -> None:
    """Add ``scale * x A^T B`` to ``y``, in place; columns of ``y`` beyond B's stay as they are, and B's beyond ``y``'s
    are not computed.
    """
    for group in groups:
        packed = pack_of(group.slot)
        y = y_TO[group.rows]
        columns = min(packed.B_RO.shape[1], y.shape[1])
        z_TR = torch.mm(x_TI[group.rows].to(packed.A_RI.dtype), packed.A_RI.T)
        target, B_RO = y[:, :columns], packed.B_RO[:, :columns]
        if y.dtype == B_RO.dtype:
            target.addmm_(z_TR, B_RO, alpha=scale)
        else:
            target.add_(torch.mm(z_TR, B_RO), alpha=scale)
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
        pack_of = _packs(self, lora_a_stacked, lora_b_stacked, output_slices)
        add_products(y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]), scale, groups, pack_of)

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
        pack_of = _packs(self, (lora_a_stacked,), (lora_b_stacked,), (lora_b_stacked.shape[-2],))
        add_products(y, x, scale, groups_of(indices), pack_of)

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
                packs: dict[tuple[int, int], Pack] = getattr(wrapper, _PACKS, {})
                for key in [key for key in packs if key[0] == slot]:
                    del packs[key]
        return activated

    wrapper_class.update_metadata = update_metadata
    wrapper_class.add_lora_linear = add_lora_linear
    wrapper_class.add_lora_logits = add_lora_logits
    wrapper_class.add_lora_embedding = add_lora_embedding
    manager_class.activate_adapter = activate_adapter
    setattr(wrapper_class, _APPLIED, True)


def _packs(
    wrapper: Any, a_stacked: Sequence[torch.Tensor], b_stacked: Sequence[torch.Tensor], widths: Sequence[int]
) -> Callable[[int], Pack]:
    """Return what finds a slot's pack of one module, or makes it. Activating an adapter forgets its slot's packs."""
    if not hasattr(wrapper, _PACKS):
        setattr(wrapper, _PACKS, {})
    packs: dict[tuple[int, int], Pack] = getattr(wrapper, _PACKS)
    ranks: Mapping[int, int] = getattr(wrapper, _RANKS, {})

    def pack_of(slot: int) -> Pack:
        key = (slot, a_stacked[0].data_ptr())
        found = packs.get(key)
        if found is None:
            rank = ranks.get(slot, a_stacked[0].shape[-2])
            found = packs[key] = pack(a_stacked, b_stacked, widths, slot, rank)
        return found

    return pack_of


def rank_of(lora_model: Any) -> int:
    """Return the largest rank among the adapter's modules (they differ under a rank pattern)."""
    ranks: list[int] = []
    for weights in lora_model.loras.values():
        packed: Any = weights.lora_a  # a list where one module packs several projections; None for those without
        parts = cast("Sequence[Any]", packed if isinstance(packed, list) else (packed,))
        ranks += [part.shape[0] for part in parts if part is not None]
    return max(ranks, default=0)
