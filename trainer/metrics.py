"""The numbers that go back with forward and forward_backward. Names are ``name:reduction``, so chunks merge.

Sums, counts, minima and maxima merge exactly. A client weighs a ``:mean`` by its chunks' datums, which is exact only
for chunks with equally many compared tokens per datum: the sums it came from are always there too.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

SENTINEL = -9999.0  # what engines report for a log-probability they do not have
_CUT = 300.0  # nats; keeps sums of squared ratios finite


@dataclass(slots=True)
class Report:
    """Collects the micro-batches of one operation; sums are in float64.

    The mismatch between trainer and sampler is taken over trained positions; an operation that trains no position at
    all reports over all of its positions. Positions whose sampler log-probability is a sentinel are left out and
    counted.
    """

    tokens: int = 0
    trained: int = 0
    loss: float = 0.0
    _over_trained: "_Differences" = field(default_factory=lambda: _Differences())
    _over_all: "_Differences" = field(default_factory=lambda: _Differences())
    _reference: list[Tensor] = field(default_factory=list[Tensor])

    def add(self, losses_P: Tensor, new_logprobs_P: Tensor, old_logprobs_P: Tensor | None, trained_P: Tensor) -> None:
        """Add a micro-batch; everything is detached. ``old_logprobs_P`` are the sampler's."""
        self.tokens += losses_P.numel()
        self.trained += int(trained_P.sum().item())
        self.loss += losses_P.detach().double().sum().item()
        if old_logprobs_P is not None:
            new_P, old_P = new_logprobs_P.detach().double().cpu(), old_logprobs_P.double().cpu()
            mask_P = trained_P.cpu()
            self._over_trained.add(new_P[mask_P], old_P[mask_P])
            self._over_all.add(new_P, old_P)

    def add_reference(self, new_logprobs_P: Tensor, ref_logprobs_P: Tensor, weights_P: Tensor) -> None:
        """Add the positions of a micro-batch where a reference is known and the KL term has weight."""
        known_P = torch.isfinite(ref_logprobs_P) & (weights_P != 0)
        self._reference.append((ref_logprobs_P.double() - new_logprobs_P.detach().double())[known_P].cpu())

    def metrics(self) -> dict[str, float]:
        metrics = {"loss:sum": self.loss, "tokens:sum": float(self.tokens), "loss_tokens:sum": float(self.trained)}
        metrics |= (self._over_trained if self.trained else self._over_all).metrics()
        if self._reference:
            d = torch.cat(self._reference).clamp(max=_CUT)
            metrics["kl_ref:sum"] = float((torch.expm1(d) - d).sum())
            metrics["kl_ref_tokens:sum"] = float(d.numel())
            if d.numel():
                metrics["kl_ref:mean"] = metrics["kl_ref:sum"] / d.numel()
        return metrics


@dataclass(slots=True)
class _Differences:
    """``d = trainer - sampler`` in nats, token by token, without sentinels."""

    parts: list[Tensor] = field(default_factory=list[Tensor])
    sentinels: int = 0

    def add(self, new_P: Tensor, old_P: Tensor) -> None:
        known_P = old_P > SENTINEL
        self.sentinels += int((~known_P).sum())
        self.parts.append((new_P - old_P)[known_P])

    def metrics(self) -> dict[str, float]:
        """Return the mismatch report; nothing when no sampler log-probability was given."""
        if not self.parts:
            return {}
        d = torch.cat(self.parts)
        n, size = d.numel(), d.abs()
        log_ratio = d.clamp(-_CUT, _CUT)
        ratio = log_ratio.exp()
        sums = {
            "mismatch": float(d.sum()),
            "mismatch_k2": float(d.square().sum()) / 2,
            "mismatch_k3": float((torch.expm1(log_ratio) - log_ratio).sum()),
            "mismatch_abs": float(size.sum()),
            "ratio_outside_0.9_1.1": float(((ratio < 0.9) | (ratio > 1.1)).sum()),
            "ratio_outside_0.5_2": float(((ratio < 0.5) | (ratio > 2)).sum()),
            "ratio": float(ratio.sum()),
            "ratio_squared": float(ratio.square().sum()),
        }
        metrics = {"mismatch_tokens:sum": float(n), "mismatch_sentinels:sum": float(self.sentinels)}
        metrics |= {f"{name}:sum": value for name, value in sums.items()}
        if not n:
            return metrics
        means = {f"{name}:mean": sums[name] / n for name in sums if name not in ("ratio", "ratio_squared")}
        highest = float(log_ratio.max())
        scaled = (log_ratio - highest).exp()
        return {
            **metrics,
            **means,
            "mismatch_k1:mean": -sums["mismatch"] / n,
            "mismatch_abs_p99:max": float(size.kthvalue(math.ceil(0.99 * n)).values),
            "mismatch_abs_max:max": float(size.max()),
            "effective_sample_size:mean": float(scaled.sum().square() / (n * scaled.square().sum())),
            "ratio_max:max": math.exp(highest),
            "kl_sample_train_v1:mean": -sums["mismatch"] / n,
            "kl_sample_train_v2:mean": sums["mismatch_k2"] / n,
        }
