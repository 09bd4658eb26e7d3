"""How much memory an operation takes while it runs, bounded from its lengths alone, and the limit it is held to.

The bound depends on model, settings and operation, never on what is free at the moment: the same operation is always
admitted or always refused. It covers what comes on top of the model and of the sessions' own tensors: activations,
gradients, logits, and the tensors of one micro-batch.
"""

import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.core.errors import Invalid
from gateway.core.tensors import Datum

MIB = 1 << 20
TARGETS_PER_TOKEN = 64  # of a micro-batch's token budget: datums with a common prefix have many targets and few rows
_LARGEST_ACTIVATIONS = 1 << 30  # kept for backward when there is room
_CHUNK = 256  # queries of one sequence whose attention scores exist at once
_TARGET_BYTES = 320  # of one log-probability: its loss inputs, sorting, a loss' graph, the mismatch report
_FIXED_BYTES = 96 * MIB  # tiles of logits, workspaces of matrix products


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes that memory depends on.

    ``score_keys`` is the most keys for which attention scores are materialised; ``quadratic`` says that the plain way
    through the model materialises all of them at once.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    head_size: int
    element_bytes: int
    score_keys: int
    quadratic: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Of operations on one model: ``limit_bytes`` for each, of which a part keeps activations for backward.

    ``micro_batch_tokens`` is the planner's ``max_tokens``, ``targets`` its ``max_targets``.
    """

    shape: ModelShape
    limit_bytes: int
    micro_batch_tokens: int

    @property
    def activation_bytes(self) -> int:
        return min(_LARGEST_ACTIVATIONS, self.limit_bytes // 4)

    @property
    def targets(self) -> int:
        """The most targets of a micro-batch of several datums."""
        return TARGETS_PER_TOKEN * self.micro_batch_tokens

    def checkpoints(self, rows: int) -> bool:
        """Whether the plain way keeps only each layer's input of so many token positions."""
        return rows * self._plain_layer * self.shape.layers > self.activation_bytes

    def lean(self, rows: int, longest: int, targets: int, trained_bytes: int) -> int:
        """Return a bound for a micro-batch on the lean decoder.

        Args:
            rows: token positions computed.
            longest: tokens of its longest datum.
            targets: log-probabilities asked for.
            trained_bytes: one float32 copy of the session's masters.
        """
        s, wide = self.shape, 4 * self.shape.hidden
        least = wide + s.element_bytes * (2 * s.heads * s.head_size + 2 * s.intermediate)
        layer = wide + s.element_bytes * (6 * s.heads * s.head_size + 2 * s.intermediate)
        layer += s.element_bytes * s.heads * min(longest, _CHUNK, s.score_keys)  # probabilities, where few
        inputs = rows * wide * s.layers
        kept = min(max(self.activation_bytes - inputs, 0) * layer // least, rows * layer * s.layers)
        at_once = max(_CHUNK, min(rows, self.micro_batch_tokens))
        scores = 5 * s.element_bytes * s.heads * min(longest, s.score_keys) * at_once
        flight = rows * (3 * layer + 8 * wide)
        return self._common(targets, trained_bytes) + inputs + kept + flight + scores

    def plain(self, rows: int, longest: int, targets: int, trained_bytes: int) -> int:
        """As ``lean``, for transformers + PEFT; ``rows`` counts padding."""
        s, layer = self.shape, self._plain_layer
        kept = rows * layer * s.layers
        if self.checkpoints(rows):
            kept = rows * s.element_bytes * s.hidden * s.layers
        scores = 16 * s.heads * rows * longest if s.quadratic else 0
        return self._common(targets, trained_bytes) + kept + 2 * rows * layer + scores

    def check(self, data: Sequence[Datum], trained_bytes: int, *, lean: bool) -> None:
        """Refuse an operation with a datum that cannot be computed within the limit.

        Raises:
            Invalid: ``memory_limit_exceeded`` names the datum, its length and the longest that fits.
        """

        def bound(length: int, per_token: int) -> int:
            targets = max(length * per_token, self.targets)
            if lean:
                return self.lean(self._rows(length), length, targets, trained_bytes)
            return self.plain(length, length, targets, trained_bytes)

        for index, datum in enumerate(data):
            length, per_token = datum.length, datum.loss_fn_inputs["target_tokens"].size // datum.length
            if (needed := bound(length, per_token)) <= self.limit_bytes:
                continue
            fits = 0
            for step in (1 << power for power in reversed(range(length.bit_length()))):
                n = fits + step
                if n < length and bound(n, per_token) <= self.limit_bytes:
                    fits = n
            raise Invalid(
                f"data[{index}] has {length} tokens, which may take {-(-needed // MIB)} MiB to compute; this trainer "
                f"allows an operation {self.limit_bytes // MIB} MiB, enough for {fits} such tokens",
                code="memory_limit_exceeded",
                field=f"data[{index}].model_input",
                details={"datum": index, "limit": fits, "got": length},
            )

    def require_room(self) -> None:
        """Check that micro-batches of short datums fit.

        Raises:
            ValueError: says which setting is too small, or too large.
        """
        n = self.micro_batch_tokens
        needed = max(self.lean(self._rows(n), n, self.targets, 0), self.plain(n, n, self.targets, 0))
        if needed > self.limit_bytes:
            raise ValueError(
                f"micro-batches of {n} tokens may take {-(-needed // MIB)} MiB, above the limit of "
                f"{self.limit_bytes // MIB} MiB: raise LOOPLINE_OPERATION_BYTES or lower LOOPLINE_MICRO_BATCH_TOKENS"
            )

    def _rows(self, longest: int) -> int:
        """Return the most token positions of a lean micro-batch whose longest datum has so many tokens."""
        return max(self.micro_batch_tokens, longest + self.micro_batch_tokens // 2)

    @property
    def _plain_layer(self) -> int:
        """Bytes that autograd keeps of one token in one layer, LoRA's float32 copies included."""
        return 4 * (20 * self.shape.hidden + 8 * self.shape.intermediate)

    def _common(self, targets: int, trained_bytes: int) -> int:
        return _FIXED_BYTES + targets * _TARGET_BYTES + 3 * trained_bytes


def machine_bytes() -> int:
    """Return the memory of this machine, or of its container where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(path).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return total


def peak_bytes() -> int:
    """Return the most memory this program has had resident.

    On Linux ``ru_maxrss`` begins with what the process had before it became this program: its parent's.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
