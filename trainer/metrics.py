"""The numbers that go back with forward and forward_backward. Names are ``name:reduction``, so chunks merge."""

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class Report:
    """Sums over the micro-batches of one operation, in float64.

    The mismatch between sampler and trainer is taken over trained positions, with ``d = sampler - trainer`` in nats:
    ``kl_sample_train_v1`` is the mean of d, ``kl_sample_train_v2`` half the mean of d squared, ``ratio_max`` the
    largest ``exp(-d)``. An operation that trains no position at all reports over all of its positions.
    """

    tokens: int = 0
    trained: int = 0
    loss: float = 0.0
    _over_trained: "_Mismatch | None" = None
    _over_all: "_Mismatch | None" = None

    def add(self, losses_P: Tensor, new_logprobs_P: Tensor, old_logprobs_P: Tensor | None, trained_P: Tensor) -> None:
        """Add a micro-batch; everything is detached."""
        self.tokens += losses_P.numel()
        self.trained += int(trained_P.sum().item())
        self.loss += losses_P.detach().double().sum().item()
        if old_logprobs_P is not None:
            difference_P = old_logprobs_P.double() - new_logprobs_P.detach().double()
            self._over_trained = _Mismatch.of(difference_P[trained_P]).joined(self._over_trained)
            self._over_all = _Mismatch.of(difference_P).joined(self._over_all)

    def metrics(self) -> dict[str, float]:
        metrics = {"loss:sum": self.loss, "tokens:sum": float(self.tokens), "loss_tokens:sum": float(self.trained)}
        mismatch = self._over_trained if self.trained else self._over_all
        if mismatch is not None:
            metrics["kl_sample_train_v1:mean"] = mismatch.total / mismatch.count
            metrics["kl_sample_train_v2:mean"] = mismatch.squares / mismatch.count / 2
            metrics["ratio_max:max"] = math.exp(min(-mismatch.least, 700.0))
        return metrics


@dataclass(frozen=True, slots=True)
class _Mismatch:
    """Count, sum, sum of squares and least value of a set of differences."""

    count: int
    total: float
    squares: float
    least: float

    @classmethod
    def of(cls, difference_P: Tensor) -> "_Mismatch":
        if not difference_P.numel():
            return cls(0, 0.0, 0.0, math.inf)
        total, squares, least = difference_P.sum(), difference_P.square().sum(), difference_P.min()
        return cls(difference_P.numel(), float(total), float(squares), float(least))

    def joined(self, other: "_Mismatch | None") -> "_Mismatch":
        if other is None:
            return self
        return _Mismatch(
            self.count + other.count,
            self.total + other.total,
            self.squares + other.squares,
            min(self.least, other.least),
        )
