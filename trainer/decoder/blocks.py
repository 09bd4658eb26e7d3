"""From a micro-batch's nodes to attention blocks: batches of equal shape, with as little padding as pays.

Pure, no torch. A *family* is a set of sibling nodes: their queries see the rows of all ancestors (the prefix) and, up
to their own position, their own node. A block holds F families of S siblings, own length L, prefix length P. Padding
stands to the right, where causality or a mask hides it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from trainer.decoder.plan import Ids, MicroBatch

_PADDING = 1.3  # padded score cells over real ones, up to which families of unlike shape share a block
_FREE_CELLS = 16384  # and so many cells more are cheaper than another block


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """``own_rows`` is [F, S, L], ``prefix_rows`` [F, P]; -1 is padding. ``span`` is set when own rows are a slice."""

    own_rows: Ids
    prefix_rows: Ids
    span: tuple[int, int] | None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        families, siblings, length = self.own_rows.shape
        return families, siblings, length, self.prefix_rows.shape[1]


@dataclass(frozen=True, slots=True)
class _Family:
    parent: int
    prefix: int
    nodes: tuple[int, ...]
    length: int

    @property
    def key(self) -> tuple[int, int, int, tuple[int, ...]]:
        return (self.prefix, self.length, len(self.nodes), self.nodes)


def blocks(batch: MicroBatch) -> list[Block]:
    """Cover every node of the micro-batch by exactly one block."""
    groups: list[list[_Family]] = []
    for family in sorted(_families(batch), key=lambda f: f.key):
        joined = [*groups[-1], family] if groups else []
        if joined and (joined[0].prefix > 0) == (family.prefix > 0) and _worth(joined, batch):
            groups[-1] = joined
        else:
            groups.append([family])
    return [_block(group, batch) for group in groups]


def _families(batch: MicroBatch) -> Iterable[_Family]:
    children: dict[int, list[int]] = {}
    for index, node in enumerate(batch.nodes):
        children.setdefault(node.parent, []).append(index)
    for parent, nodes in children.items():
        if parent < 0:
            for node in nodes:
                yield _Family(-1, 0, (node,), batch.nodes[node].length)
            continue
        prefix = batch.nodes[parent].position + batch.nodes[parent].length
        same: list[int] = []
        for node in sorted(nodes, key=lambda i: (batch.nodes[i].length, i)):
            if same and not _alike([batch.nodes[i].length for i in same], batch.nodes[node].length, prefix):
                yield _Family(parent, prefix, tuple(same), batch.nodes[same[-1]].length)
                same = []
            same.append(node)
        yield _Family(parent, prefix, tuple(same), batch.nodes[same[-1]].length)


def _alike(lengths: Sequence[int], longer: int, prefix: int) -> bool:
    real = sum(length * (prefix + length) for length in (*lengths, longer))
    return (len(lengths) + 1) * longer * (prefix + longer) <= _PADDING * real + _FREE_CELLS


def _worth(families: Sequence[_Family], batch: MicroBatch) -> bool:
    siblings = max(len(f.nodes) for f in families)
    length = max(f.length for f in families)
    prefix = max(f.prefix for f in families)
    lengths = [(f.prefix, batch.nodes[node].length) for f in families for node in f.nodes]
    real = sum(own * (before + own) for before, own in lengths)
    return len(families) * siblings * length * (prefix + length) <= _PADDING * real + _FREE_CELLS


def _block(families: Sequence[_Family], batch: MicroBatch) -> Block:
    shape = (len(families), max(len(f.nodes) for f in families), max(f.length for f in families))
    own = np.full(shape, -1, np.int64)
    prefix = np.full((len(families), max(f.prefix for f in families)), -1, np.int64)
    for i, family in enumerate(families):
        for j, index in enumerate(family.nodes):
            node = batch.nodes[index]
            own[i, j, : node.length] = np.arange(node.start, node.start + node.length)
        if family.parent >= 0:
            prefix[i, : family.prefix] = batch.rows(batch.path_to(family.parent))
    flat = own.reshape(-1)
    first = int(flat[0])
    is_slice = first >= 0 and bool((flat == np.arange(first, first + len(flat))).all())
    return Block(own_rows=own, prefix_rows=prefix, span=(first, first + len(flat)) if is_slice else None)
