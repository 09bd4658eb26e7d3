"""The numbers that go back with forward and forward_backward. Names are ``name:reduction``, so chunks merge.

Sums, counts, minima and maxima merge exactly. A client weighs a ``:mean`` by its chunks' datums, which is exact only
for chunks with equally many compared tokens per datum: the sums it came from are always there too.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SENTINEL = -9999.0  # what engines report for a log-probability they do not have
_CUT = 300.0  # nats; keeps sums of squared ratios finite
_SUMS = (
    "mismatch",
    "mismatch_k2",
    "mismatch_k3",
    "mismatch_abs",
    "ratio_outside_0.9_1.1",
    "ratio_outside_0.5_2",
    "ratio",
    "ratio_squared",
)


@dataclass(slots=True)
class Report:
    """Collects the micro-batches of one operation, without keeping them; sums are in float64.

    The mismatch between trainer and sampler is taken over trained positions; an operation that trains no position at
    all reports over all of its positions. Positions whose sampler log-probability is a sentinel are left out and
    counted. ``positions`` is how many log-probabilities the operation has.
    """

    positions: int
    tokens: int = 0
    trained: int = 0
    loss: float = 0.0
    _over_trained: "_Differences | None" = None
    _over_all: "_Differences | None" = None
    _reference: "_Reference | None" = None

    def add(self, losses_P: Tensor, new_logprobs_P: Tensor, old_logprobs_P: Tensor | None, trained_P: Tensor) -> None:
        """Add a micro-batch; everything is detached. ``old_logprobs_P`` are the sampler's."""
        self.tokens += losses_P.numel()
        self.trained += int(trained_P.sum().item())
        self.loss += losses_P.detach().double().sum().item()
        if old_logprobs_P is None:
            return
        new_P, old_P = new_logprobs_P.detach().double().cpu(), old_logprobs_P.double().cpu()
        mask_P = trained_P.cpu()
        self._over_trained = self._over_trained or _Differences(self.positions)
        self._over_trained.add(new_P[mask_P], old_P[mask_P])
        if not self.trained:
            self._over_all = self._over_all or _Differences(self.positions)
            self._over_all.add(new_P, old_P)

    def add_reference(self, new_logprobs_P: Tensor, ref_logprobs_P: Tensor, weights_P: Tensor) -> None:
        """Add the positions of a micro-batch where a reference is known and the KL term has weight."""
        known_P = torch.isfinite(ref_logprobs_P) & (weights_P != 0)
        self._reference = self._reference or _Reference()
        self._reference.add((ref_logprobs_P.double() - new_logprobs_P.detach().double())[known_P])

    def metrics(self) -> dict[str, float]:
        metrics = {"loss:sum": self.loss, "tokens:sum": float(self.tokens), "loss_tokens:sum": float(self.trained)}
        differences = self._over_trained if self.trained else self._over_all
        if differences is not None:
            metrics |= differences.metrics()
        if self._reference is not None:
            metrics |= self._reference.metrics()
        return metrics


@dataclass(slots=True)
class _Reference:
    """The k3 estimate of the KL to a reference."""

    tokens: int = 0
    kl: float = 0.0

    def add(self, d_P: Tensor) -> None:
        d_P = d_P.clamp(max=_CUT)
        self.tokens += d_P.numel()
        self.kl += float((torch.expm1(d_P) - d_P).sum())

    def metrics(self) -> dict[str, float]:
        metrics = {"kl_ref:sum": self.kl, "kl_ref_tokens:sum": float(self.tokens)}
        return metrics | ({"kl_ref:mean": self.kl / self.tokens} if self.tokens else {})


class _Differences:
    """``d = trainer - sampler`` in nats, token by token, without sentinels.

    Of the tokens themselves it keeps the hundredth with the largest ``|d|``, which is what the percentile needs.
    """

    def __init__(self, positions: int) -> None:
        self._kept = positions // 100 + 1
        self._largest = torch.empty(0, dtype=torch.float64)
        self._tokens = self._sentinels = 0
        self._sums = dict.fromkeys(_SUMS, 0.0)
        self._highest, self._scaled, self._scaled_squared = -math.inf, 0.0, 0.0

    def add(self, new_P: Tensor, old_P: Tensor) -> None:
        """Add float64 log-probabilities on the CPU."""
        known_P = old_P > SENTINEL
        self._sentinels += int((~known_P).sum())
        d_P = (new_P - old_P)[known_P]
        if not d_P.numel():
            return
        self._tokens += d_P.numel()
        size_P, log_ratio_P = d_P.abs(), d_P.clamp(-_CUT, _CUT)
        ratio_P = log_ratio_P.exp()
        found = (
            d_P,
            d_P.square() / 2,
            torch.expm1(log_ratio_P) - log_ratio_P,
            size_P,
            (ratio_P < 0.9) | (ratio_P > 1.1),
            (ratio_P < 0.5) | (ratio_P > 2),
            ratio_P,
            ratio_P.square(),
        )
        for name, values_P in zip(_SUMS, found, strict=True):
            self._sums[name] += float(values_P.sum())
        joined = torch.cat((self._largest, size_P))
        self._largest = joined.topk(min(self._kept, joined.numel())).values
        highest = max(self._highest, float(log_ratio_P.max()))
        shrink, scaled_P = math.exp(self._highest - highest), (log_ratio_P - highest).exp()
        self._scaled = self._scaled * shrink + float(scaled_P.sum())
        self._scaled_squared = self._scaled_squared * shrink**2 + float(scaled_P.square().sum())
        self._highest = highest

    def metrics(self) -> dict[str, float]:
        n, sums = self._tokens, self._sums
        metrics = {"mismatch_tokens:sum": float(n), "mismatch_sentinels:sum": float(self._sentinels)}
        metrics |= {f"{name}:sum": value for name, value in sums.items()}
        if not n:
            return metrics
        means = {f"{name}:mean": sums[name] / n for name in sums if name not in ("ratio", "ratio_squared")}
        return {
            **metrics,
            **means,
            "mismatch_k1:mean": -sums["mismatch"] / n,
            "mismatch_abs_p99:max": float(self._largest[n // 100]),
            "mismatch_abs_max:max": float(self._largest[0]),
            "effective_sample_size:mean": self._scaled**2 / (n * self._scaled_squared),
            "ratio_max:max": math.exp(self._highest),
            "kl_sample_train_v1:mean": -sums["mismatch"] / n,
            "kl_sample_train_v2:mean": sums["mismatch_k2"] / n,
        }
