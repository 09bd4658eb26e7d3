"""Which datums are computed together, and which of their tokens only once.

Pure: token ids in, rows and indices out; no torch. A *node* is a run of tokens computed once; the nodes of a
micro-batch form a forest, and a datum is a path from a root. Datums that begin with the same tokens share the nodes of
their common prefix. The rule looks at the operation's tokens and at the settings alone, so a replay plans the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """``max_tokens`` bounds the rows of a micro-batch, ``max_targets`` the log-probabilities asked of it.

    A datum that exceeds one of them still gets a micro-batch; so that a long prefix is shared as well, datums that
    branch off it may add half of ``max_tokens`` (see ``room``).

    A common prefix becomes a node when that saves at least ``min_saved_tokens`` rows: below that the extra attention
    blocks cost more than the rows. ``share=False`` computes every datum by itself.
    """

    max_tokens: int = 1024
    max_targets: int = 1 << 17
    min_saved_tokens: int = 64
    share: bool = True

    def room(self, longest: int) -> int:
        """Return the most rows of a micro-batch whose longest datum has so many tokens."""
        return max(self.max_tokens, longest + self.max_tokens // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Rows ``[start, start + length)`` hold its tokens, the first of which stands at ``position`` of its datums."""

    start: int
    length: int
    position: int
    parent: int  # index of a node, -1 for a root


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """``tokens`` are the rows' ids; ``paths[i]`` are the nodes of operation datum ``datums[i]``, root first."""

    datums: tuple[int, ...]
    tokens: Ids
    positions: Ids
    nodes: tuple[Node, ...]
    paths: tuple[tuple[int, ...], ...]

    def rows(self, path: Sequence[int]) -> Ids:
        """Return the rows along a path of nodes, in token order."""
        spans = [np.arange(self.nodes[i].start, self.nodes[i].start + self.nodes[i].length) for i in path]
        return np.concatenate(spans) if spans else np.zeros(0, np.int64)

    def path_to(self, node: int) -> tuple[int, ...]:
        """Return the ancestors of a node and itself, root first; -1 gives no nodes."""
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = self.nodes[node].parent
        return tuple(reversed(path))


@dataclass(slots=True)
class _Draft:
    """A node before its rows are known: tokens ``[begin, end)`` of datum ``datum``."""

    datum: int
    begin: int
    end: int
    parent: int


def plan(sequences: Sequence[Ids], settings: PlanSettings, targets: Sequence[int] | None = None) -> list[MicroBatch]:
    """Split an operation into micro-batches. Every datum is in exactly one; arguments as for ``plan_each``."""
    return list(plan_each(sequences, settings, targets))


def plan_each(
    sequences: Sequence[Ids], settings: PlanSettings, targets: Sequence[int] | None = None
) -> Iterator[MicroBatch]:
    """As ``plan``, one micro-batch after the other: their layouts are not all in memory at once.

    Args:
        targets: how many log-probabilities are asked of each sequence; None: one per token.

    Raises:
        ValueError: a sequence is empty.
    """
    for index, sequence in enumerate(sequences):
        if not len(sequence):
            raise ValueError(f"sequence {index} has no tokens")
    forest = _Forest(sequences, settings, [len(sequence) for sequence in sequences] if targets is None else targets)
    return (forest.micro_batch(order) for order in _pack(forest, settings))


class _Forest:
    """The operation's datums in lexicographic order, so that common prefixes are neighbours."""

    def __init__(self, sequences: Sequence[Ids], settings: PlanSettings, targets: Sequence[int]) -> None:
        self._settings = settings
        self.targets = targets
        self.sequences = [np.asarray(sequence, np.int64) for sequence in sequences]
        keys = [sequence.astype(">u4").tobytes() for sequence in self.sequences]
        self._rank = {index: rank for rank, index in enumerate(sorted(range(len(keys)), key=lambda i: (keys[i], i)))}

    def trees(self) -> list[tuple[int, ...]]:
        """Return groups of datums that share their first node, each in lexicographic order."""
        order = sorted(range(len(self.sequences)), key=self._rank.__getitem__)
        _, paths = self._drafts(order)
        trees: dict[int, list[int]] = {}
        for index, path in zip(order, paths, strict=True):
            trees.setdefault(path[0], []).append(index)
        return [tuple(tree) for tree in trees.values()]

    def cost(self, order: Sequence[int]) -> int:
        """Return how many rows these datums take together."""
        drafts, _ = self._drafts(sorted(order, key=self._rank.__getitem__))
        return sum(draft.end - draft.begin for draft in drafts)

    def common(self, a: int, b: int) -> int:
        """Return the length of the common prefix of two datums."""
        left, right = self.sequences[a], self.sequences[b]
        size = min(len(left), len(right))
        different = np.flatnonzero(left[:size] != right[:size])
        return int(different[0]) if len(different) else size

    def micro_batch(self, order: Sequence[int]) -> MicroBatch:
        """Lay out the nodes of some datums: by position, then by length, so that equal shapes are neighbours."""
        ordered = sorted(order, key=self._rank.__getitem__)
        drafts, paths = self._drafts(ordered)
        layout = sorted(range(len(drafts)), key=lambda i: (drafts[i].begin, drafts[i].end, i))
        where = {draft: place for place, draft in enumerate(layout)}
        nodes: list[Node] = []
        start = 0
        for i in layout:
            draft = drafts[i]
            parent = where[draft.parent] if draft.parent >= 0 else -1
            nodes.append(Node(start=start, length=draft.end - draft.begin, position=draft.begin, parent=parent))
            start += draft.end - draft.begin
        chosen = [drafts[i] for i in layout]
        return MicroBatch(
            datums=tuple(ordered),
            tokens=np.concatenate([self.sequences[d.datum][d.begin : d.end] for d in chosen]),
            positions=np.concatenate([np.arange(d.begin, d.end) for d in chosen]),
            nodes=tuple(nodes),
            paths=tuple(tuple(where[i] for i in path) for path in paths),
        )

    def _drafts(self, order: Sequence[int]) -> tuple[list[_Draft], list[tuple[int, ...]]]:
        """Return nodes, parents first, and one path per datum of ``order`` (lexicographic)."""
        drafts: list[_Draft] = []
        paths: list[tuple[int, ...]] = [()] * len(order)
        if not self._settings.share:
            for place, index in enumerate(order):
                drafts.append(_Draft(index, 0, len(self.sequences[index]), -1))
                paths[place] = (place,)
            return drafts, paths
        # (low, high): datums order[low:high] agree up to ``depth``; their next node begins at ``begin`` under ``path``.
        pending: list[tuple[int, int, int, int, tuple[int, ...]]] = [(0, len(order), 0, 0, ())]
        while pending:
            low, high, begin, depth, path = pending.pop()
            for first, last in self._children(order, low, high, depth):
                end = self.common(order[first], order[last - 1])
                parts = self._children(order, first, last, end)
                whole = len(parts) == 1 and len(self.sequences[order[first]]) == end
                if not whole and (end - begin) * (len(parts) - 1) < self._settings.min_saved_tokens:
                    pending.append((first, last, begin, end, path))
                    continue
                own = path
                if end > begin:
                    drafts.append(_Draft(order[first], begin, end, path[-1] if path else -1))
                    own = (*path, len(drafts) - 1)
                at_end = next((i for i in range(first, last) if len(self.sequences[order[i]]) > end), last)
                for place in range(first, at_end):
                    paths[place] = own
                if at_end < last:
                    pending.append((at_end, last, end, end, own))
        return drafts, paths

    def _children(self, order: Sequence[int], low: int, high: int, depth: int) -> list[tuple[int, int]]:
        """Split ``order[low:high]`` by the token at ``depth``; datums that end there come first, as one part."""
        parts: list[tuple[int, int]] = []
        previous: int | None = None
        for place in range(low, high):
            sequence = self.sequences[order[place]]
            token = int(sequence[depth]) if len(sequence) > depth else -1
            if previous is None or token != previous:
                parts.append((place, place + 1))
                previous = token
            else:
                parts[-1] = (parts[-1][0], place + 1)
        return parts


def _pack(forest: _Forest, settings: PlanSettings) -> list[tuple[int, ...]]:
    """Group trees of similar length into micro-batches of about equal size; cut a tree that is too large."""
    pieces: list[tuple[int, tuple[int, ...]]] = []
    max_tokens = settings.max_tokens
    for tree in forest.trees():
        for piece in _cut(forest, tree, settings):
            pieces.extend(_halved(forest, piece, settings))
    pieces.sort(key=lambda p: (max(len(forest.sequences[i]) for i in p[1]), p[0], p[1]))
    total = sum(cost for cost, _ in pieces)
    target = total / max(1, -(-total // max_tokens))
    batches: list[list[int]] = []
    size, asked = 0, 0
    for cost, piece in pieces:
        targets = sum(forest.targets[index] for index in piece)
        full = size + cost > max_tokens or size + cost / 2 > target or asked + targets > settings.max_targets
        if not batches or full:
            batches.append([])
            size, asked = 0, 0
        batches[-1].extend(piece)
        size += cost
        asked += targets
    return [tuple(batch) for batch in batches]


def _halved(forest: _Forest, piece: tuple[int, ...], settings: PlanSettings) -> list[tuple[int, tuple[int, ...]]]:
    """Return a piece with its cost, halved while that is above the budget: prefixes too short to share are rows too."""
    cost = forest.cost(piece)
    if cost <= settings.room(max(len(forest.sequences[i]) for i in piece)) or len(piece) == 1:
        return [(cost, piece)]
    middle = len(piece) // 2
    return [*_halved(forest, piece[:middle], settings), *_halved(forest, piece[middle:], settings)]


def _cut(forest: _Forest, tree: tuple[int, ...], settings: PlanSettings) -> list[tuple[int, ...]]:
    """Cut a tree that exceeds the budget where its neighbours have least in common; each piece repeats its prefix."""
    pieces: list[tuple[int, ...]] = []
    start, size, costs = 0, 0, [0]
    asked, longest = 0, 0
    for place in range(len(tree)):
        fresh = len(forest.sequences[tree[place]])
        added = fresh if place == start else fresh - forest.common(tree[place - 1], tree[place])
        asked += forest.targets[tree[place]]
        longest = max(longest, fresh)
        if place > start and (size + added > settings.room(longest) or asked > settings.max_targets):
            candidates = [i for i in range(start + 1, place + 1) if costs[i - start] >= size / 2] or [place]
            cut = min(candidates, key=lambda i: (forest.common(tree[i - 1], tree[i]), -i))
            pieces.append(tree[start:cut])
            start, size, costs = cut, 0, [0]
            asked = sum(forest.targets[index] for index in tree[cut : place + 1])
            longest = max(len(forest.sequences[index]) for index in tree[cut : place + 1])
            for i in range(cut, place + 1):
                fresh = len(forest.sequences[tree[i]])
                size += fresh if i == cut else fresh - forest.common(tree[i - 1], tree[i])
                costs.append(size)
            continue
        size += added
        costs.append(size)
    pieces.append(tree[start:])
    return pieces
