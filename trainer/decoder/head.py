"""Log-probabilities from final hidden states, tile by tile: logits never exist for more than a few rows and tokens.

A *query* asks for the log-probability of one token at one row; rows of a shared prefix have several, [N, K] targets
too. Going over the vocabulary once, with a running maximum, gives the log-sum-exp and, for rows that will receive a
gradient, the direction ``W[first target] - sum_v p_v W_v``: backward then is one multiplication per row. The first
target is left out of the sum, so confident rows keep their relative precision in bfloat16.

A product in bfloat16 rounds a logit of 20 by up to 0.06: a twentieth of an importance ratio. So targets, and whatever
comes near a row's maximum, are multiplied out again in float32; the rest average their errors away.

Which rows share a tile does not depend on where gradients are wanted: forward bits are those of training.
Suffixes: T rows, H hidden features, V vocabulary, Q queries, R rank of a LoRA on the head (float32).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.decoder.lora import Gradients, Group

_NEAR = 2.0  # nats below a row's highest logit so far, down to which logits are computed again
_REFINED = 4096  # of them at once; bounds memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Rows and vocabulary entries of one tile of logits: small enough for the cache, no power of two as row stride."""

    rows: int = 512
    entries: int = 1536


@dataclass(frozen=True, slots=True, kw_only=True)
class Queries:
    """Sorted by row; every row has at least one. ``bounds`` [T + 1] are host-side offsets of each row's queries."""

    rows_Q: Tensor
    tokens_Q: Tensor
    first_T: Tensor  # index of each row's first query
    bounds: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Scored:
    """What backward needs. ``direction_TH`` is None without gradients; ``inner_*`` only with a LoRA on the head."""

    logprobs_Q: Tensor
    lse_T: Tensor
    wanted_T: Tensor
    direction_TH: Tensor | None
    inner_TR: Tensor | None
    inner_direction_TR: Tensor | None


class Head:
    """The unembedding ``weight`` [V, H]; ``dtype`` computes the base product (float32: an exact head)."""

    def __init__(self, weight: Tensor, dtype: torch.dtype, tiling: Tiling) -> None:
        self._weight = weight
        self._dtype = dtype
        self._tiling = tiling
        self._buffers: tuple[Tensor, Tensor] | None = None

    def score(self, h_TH: Tensor, q: Queries, lora: Group, temperature: float, wanted_T: Tensor | None) -> Scored:
        """Answer all queries; ``wanted_T`` (bool) are the rows whose gradient may be asked for, None for none."""
        rows, hidden = h_TH.shape
        h_TH = h_TH.to(self._dtype)
        lse_T = torch.empty(rows, dtype=torch.float32, device=h_TH.device)
        targets_Q = lse_T.new_empty(q.rows_Q.shape)
        inner_TR = lora.inner(h_TH.float())
        wanted = torch.zeros(rows, dtype=torch.bool, device=h_TH.device) if wanted_T is None else wanted_T
        direction_TH = None if wanted_T is None else lse_T.new_zeros((rows, hidden))
        inner_direction = None if wanted_T is None or inner_TR is None else torch.zeros_like(inner_TR)
        for start in range(0, rows, self._tiling.rows):
            end = min(start + self._tiling.rows, rows)
            part = slice(q.bounds[start], q.bounds[end])
            chosen = wanted[start:end].nonzero().squeeze(1) if wanted_T is not None else None
            self._score_rows(
                h_TH[start:end],
                None if inner_TR is None else inner_TR[start:end],
                _Local(q.rows_Q[part] - start, q.tokens_Q[part], q.first_T[start:end] - q.bounds[start]),
                lora,
                temperature,
                targets_Q[part],
                lse_T[start:end],
                None if direction_TH is None else direction_TH[start:end],
                None if inner_direction is None else inner_direction[start:end],
                chosen,
            )
        return Scored(
            logprobs_Q=targets_Q - lse_T[q.rows_Q],
            lse_T=lse_T,
            wanted_T=wanted,
            direction_TH=direction_TH,
            inner_TR=inner_TR,
            inner_direction_TR=inner_direction,
        )

    def backward(
        self, grad_Q: Tensor, h_TH: Tensor, q: Queries, s: Scored, lora: Group, temperature: float, sink: Gradients
    ) -> Tensor:
        """Return the float32 gradient of ``h_TH``; put those of the head's LoRA into ``sink``.

        Raises:
            ValueError: a row outside ``wanted_T`` received a gradient.
        """
        assert s.direction_TH is not None
        grad_Q = grad_Q / temperature
        grad_T = torch.zeros_like(s.lse_T).index_add_(0, q.rows_Q, grad_Q)
        touched_T = torch.zeros_like(s.lse_T).index_add_(0, q.rows_Q, grad_Q.abs())
        if bool((touched_T[~s.wanted_T] != 0).any()):
            raise ValueError("a position outside need_grad_positions received a gradient")
        dh_TH = s.direction_TH * grad_T[:, None]
        first_Q = q.first_T[q.rows_Q]
        others = (torch.arange(len(first_Q), device=first_Q.device) != first_Q) & (grad_Q != 0)
        others &= q.tokens_Q != q.tokens_Q[first_Q]
        extra = others.nonzero().squeeze(1)
        at, plus, minus = q.rows_Q[extra], q.tokens_Q[extra], q.tokens_Q[first_Q[extra]]
        if len(extra):
            step = (self._weight[plus].float() - self._weight[minus].float()) * grad_Q[extra, None]
            dh_TH.index_add_(0, at, step)
        if s.inner_TR is None or s.inner_direction_TR is None or lora.A_RI is None:
            return dh_TH
        B_VR = lora.blocks[0].B_OR
        dz_TR = s.inner_direction_TR * grad_T[:, None]
        if len(extra):
            dz_TR.index_add_(0, at, (B_VR[plus] - B_VR[minus]) * grad_Q[extra, None])
        dB_VR = self._gradient_of_b(h_TH.to(self._dtype), grad_T, s, lora, temperature)
        dB_VR.index_add_(0, q.tokens_Q, s.inner_TR[q.rows_Q] * grad_Q[:, None])
        sink.put(lora.blocks[0].pairs[0].names, torch.mm(dz_TR.t(), h_TH.float()), dB_VR)
        return dh_TH.addmm_(dz_TR, lora.A_RI)

    def _score_rows(
        self,
        h_CH: Tensor,
        z_CR: Tensor | None,
        q: "_Local",
        lora: Group,
        temperature: float,
        targets_Q: Tensor,
        lse_C: Tensor,
        direction_CH: Tensor | None,
        inner_direction_CR: Tensor | None,
        chosen: Tensor | None,
    ) -> None:
        """One chunk of rows; writes into the last five. ``chosen`` are the rows whose direction is wanted."""
        rows = h_CH.shape[0]
        top = torch.full((rows,), float("-inf"), dtype=torch.float32, device=h_CH.device)
        rest = torch.zeros_like(top)  # sum of exp(logit - top) over all but the first target
        reference = q.tokens[q.first]
        sums = _Sums(direction_CH, inner_direction_CR, chosen, rows)
        for begin in range(0, self._weight.shape[0], self._tiling.entries):
            W, logits = self._logits(h_CH, z_CR, begin, lora, temperature)
            stop = begin + W.shape[0]
            higher = torch.maximum(top, logits.amax(dim=1))
            mine = ((q.tokens >= begin) & (q.tokens < stop)).nonzero().squeeze(1)
            if self._dtype != torch.float32:
                near = (logits > (higher - _NEAR)[:, None]).nonzero()
                asked = torch.stack((q.rows[mine], q.tokens[mine] - begin), dim=1)
                self._refine_(logits, torch.cat((near, asked)), h_CH, z_CR, begin, lora, temperature)
            targets_Q[mine] = logits[q.rows[mine], q.tokens[mine] - begin]
            shrink = torch.exp(top - higher)
            top = higher
            cells = logits.sub_(top[:, None]).exp_()
            hit = ((reference >= begin) & (reference < stop)).nonzero().squeeze(1)
            cells[hit, reference[hit] - begin] = 0.0
            rest.mul_(shrink).add_(cells.sum(dim=1))
            if sums.rows is not None:
                sums.add(cells, shrink, W, lora.blocks[0].B_OR[begin:stop] if lora.blocks else None)
        own = torch.exp(targets_Q[q.first] - top)
        total = rest + own
        lse_C.copy_(torch.log(total).add_(top))
        if sums.rows is not None:
            sums.finish(rest, total, self._weight[reference], lora.blocks[0].B_OR[reference] if lora.blocks else None)

    def _gradient_of_b(self, h_TH: Tensor, grad_T: Tensor, s: Scored, lora: Group, temperature: float) -> Tensor:
        """Return ``-sum_t grad_t p_t z_t^T`` [V, R] from logits computed again for rows with a gradient."""
        assert s.inner_TR is not None
        dB_VR = torch.zeros_like(lora.blocks[0].B_OR)
        rows = grad_T.nonzero().squeeze(1)
        for start in range(0, len(rows), self._tiling.rows):
            at = rows[start : start + self._tiling.rows]
            h, z, lse = h_TH[at], s.inner_TR[at], s.lse_T[at]
            pull = z * -grad_T[at, None]
            for begin in range(0, self._weight.shape[0], self._tiling.entries):
                _, logits = self._logits(h, z, begin, lora, temperature)
                cells = logits.sub_(lse[:, None]).exp_()
                dB_VR[begin : begin + cells.shape[1]].addmm_(cells.t(), pull)
        return dB_VR

    def _logits(
        self, h_CH: Tensor, z_CR: Tensor | None, begin: int, lora: Group, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return a tile's rows of the head, and its float32 logits in a buffer that the next call overwrites."""
        W = self._weight[begin : begin + self._tiling.entries].to(self._dtype)
        product, wide = self._space(h_CH.device)
        product = product[: h_CH.shape[0] * W.shape[0]].view(h_CH.shape[0], W.shape[0])
        torch.mm(h_CH, W.t(), out=product)
        logits = product
        if product.dtype != torch.float32:
            logits = wide[: product.numel()].view(product.shape).copy_(product)
        if z_CR is not None:
            logits.addmm_(z_CR, lora.blocks[0].B_OR[begin : begin + W.shape[0]].t())
        return W, logits if temperature == 1.0 else logits.div_(temperature)

    def _refine_(
        self,
        logits: Tensor,
        cells: Tensor,
        h_CH: Tensor,
        z_CR: Tensor | None,
        begin: int,
        lora: Group,
        temperature: float,
    ) -> None:
        """Put exact logits into ``cells`` [n, 2] (row, entry) of the tile that starts at ``begin``."""
        for start in range(0, len(cells), _REFINED):
            row, entry = cells[start : start + _REFINED].unbind(1)
            exact = torch.mul(h_CH[row].float(), self._weight[begin + entry]).sum(dim=1)
            if z_CR is not None:
                exact += torch.mul(z_CR[row], lora.blocks[0].B_OR[begin + entry]).sum(dim=1)
            logits[row, entry] = exact / temperature

    def _space(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._buffers is None:
            size = self._tiling.rows * self._tiling.entries
            product = torch.empty(size, dtype=self._dtype, device=device)
            wide = product if self._dtype == torch.float32 else torch.empty(size, dtype=torch.float32, device=device)
            self._buffers = (product, wide)
        return self._buffers


@dataclass(frozen=True, slots=True)
class _Local:
    """The queries of a chunk, rows counted from its first."""

    rows: Tensor
    tokens: Tensor
    first: Tensor


class _Sums:
    """``sum_v exp(logit_v - top) W_v`` (and B_v) over the tiles, of a chunk's rows that want it."""

    def __init__(self, direction_CH: Tensor | None, inner_CR: Tensor | None, chosen: Tensor | None, rows: int) -> None:
        self.rows = chosen if direction_CH is not None and chosen is not None and len(chosen) else None
        if self.rows is None or direction_CH is None:
            return
        self._targets = (direction_CH, inner_CR)
        self._every = len(self.rows) == rows
        self._sum_H = direction_CH.new_zeros((len(self.rows), direction_CH.shape[1]))
        self._sum_R = None if inner_CR is None else inner_CR.new_zeros((len(self.rows), inner_CR.shape[1]))

    def add(self, cells: Tensor, shrink: Tensor, W: Tensor, B: Tensor | None) -> None:
        shrink = self._mine(shrink)[:, None]
        cells = self._mine(cells)
        self._sum_H.mul_(shrink)
        if W.dtype == torch.float32:
            self._sum_H.addmm_(cells, W)
        else:
            self._sum_H.add_(torch.mm(cells.to(W.dtype), W))
        if self._sum_R is not None and B is not None:
            self._sum_R.mul_(shrink).addmm_(cells, B)

    def finish(self, rest: Tensor, total: Tensor, own_W: Tensor, own_B: Tensor | None) -> None:
        """Write ``(1 - p) W_own - sum / total`` to the chosen rows of the two targets."""
        rest, total = self._mine(rest)[:, None], self._mine(total)[:, None]
        direction_CH, inner_CR = self._targets
        direction_CH[self.rows] = self._sum_H.div_(-total).addcmul_(self._mine(own_W).float(), rest / total)
        if inner_CR is not None and self._sum_R is not None and own_B is not None:
            inner_CR[self.rows] = self._sum_R.div_(-total).addcmul_(self._mine(own_B), rest / total)

    def _mine(self, x: Tensor) -> Tensor:
        return x if self._every else x[self.rows]
