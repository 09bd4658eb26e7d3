"""One small operation on many tensors in one call: hundreds of calls from Python would take longer than their work."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

_torch: Any = torch  # these functions carry no types


def add(left: Sequence[Tensor], right: Sequence[Tensor]) -> list[Tensor]:
    """Return the sums, element by element."""
    return list(_torch._foreach_add(left, right))


def times(tensors: Sequence[Tensor], factor: float) -> list[Tensor]:
    """Return every tensor times ``factor``, or the tensors themselves when that is 1."""
    return list(tensors) if factor == 1.0 or not tensors else list(_torch._foreach_mul(tensors, factor))


def scale_(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply every tensor in place."""
    if tensors and factor != 1.0:
        _torch._foreach_mul_(tensors, factor)


def copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, in the target's dtype."""
    if targets:
        _torch._foreach_copy_(targets, sources)


def norms(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the L2 norm of each tensor, summed in ``dtype``."""
    return cast(list[Tensor], _torch._foreach_norm(tensors, 2, dtype=dtype))
