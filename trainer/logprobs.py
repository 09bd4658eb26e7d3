"""Log-probabilities of given tokens, without ever holding ``[P, V]`` logits.

P counts positions, K alternatives per position, H hidden features, V vocabulary, R the rank of a LoRA on the head.
Positions go through the head in chunks of a fixed size; backward recomputes the logits, and only of positions that
received a gradient. The forward bits therefore depend on nothing but the hidden states: not on the loss, nor on whether
a gradient is wanted.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

CHUNK_BYTES = 64 * 1024 * 1024  # of float32 logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The unembedding. With LoRA the logits are ``h W^T + scale * (h A^T) B^T``, the second term in float32."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    A_RH: Tensor | None = None
    B_VR: Tensor | None = None
    scale: float = 1.0
    chunk_bytes: int = CHUNK_BYTES

    @property
    def chunk(self) -> int:
        """Positions per chunk: a property of the model alone."""
        return max(16, self.chunk_bytes // (4 * self.weight_VH.shape[0]))


def target_logprobs(hidden_PH: Tensor, targets: Tensor, head: Head, temperature_P: Tensor | None = None) -> Tensor:
    """Return float32 ``log_softmax(logits / temperature)[target]``; differentiable in hidden states, A and B.

    Args:
        targets: token ids, ``[P]`` or ``[P, K]``; the result has this shape.
        temperature_P: above 0; None is 1 everywhere.
    """
    targets_PK = targets if targets.dim() == 2 else targets[:, None]
    logprobs_PK = cast(Tensor, _TargetLogprobs.apply(hidden_PH, head.A_RH, head.B_VR, targets_PK, temperature_P, head))
    return logprobs_PK.view(targets.shape)


def likeliest(hidden_PH: Tensor, head: Head, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` likeliest tokens at each position and their float32 log-probabilities, ``[P, count]``."""
    tokens: list[Tensor] = []
    logprobs: list[Tensor] = []
    for start in range(0, hidden_PH.shape[0], head.chunk):
        logits = _logits(hidden_PH[start : start + head.chunk], head, None)
        best = logits.topk(count, dim=1)
        tokens.append(best.indices)
        logprobs.append(best.values - logits.logsumexp(dim=1, keepdim=True))
    return torch.cat(tokens), torch.cat(logprobs)


def _logits(hidden: Tensor, head: Head, temperature: Tensor | None) -> Tensor:
    """Return float32 logits over temperature; the base product runs in the head's own dtype, as engines compute it."""
    logits = torch.nn.functional.linear(hidden.to(head.weight_VH.dtype), head.weight_VH, head.bias_V).float()
    if head.A_RH is not None and head.B_VR is not None:
        logits = logits.addmm(hidden.float() @ head.A_RH.T, head.B_VR.T, alpha=head.scale)
    return logits if temperature is None else logits.div_(temperature[:, None])


class _TargetLogprobs(Function):
    """The chunked product with a hand-written backward."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden_PH: Tensor,
        A_RH: Tensor | None,
        B_VR: Tensor | None,
        targets_PK: Tensor,
        temperature_P: Tensor | None,
        head: Head,
    ) -> Tensor:
        ctx.save_for_backward(hidden_PH, A_RH, B_VR, targets_PK, temperature_P)  # pyright: ignore[reportArgumentType]
        ctx.head = head  # pyright: ignore[reportAttributeAccessIssue]
        result = torch.empty(targets_PK.shape, dtype=torch.float32, device=hidden_PH.device)
        for start in range(0, hidden_PH.shape[0], head.chunk):
            rows = slice(start, start + head.chunk)
            logits = _logits(hidden_PH[rows], head, None if temperature_P is None else temperature_P[rows])
            result[rows] = logits.gather(1, targets_PK[rows]) - logits.logsumexp(dim=1, keepdim=True)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        hidden_PH, A_RH, B_VR, targets_PK, temperature_P = ctx.saved_tensors
        head: Head = ctx.head
        grad_PK: Tensor = grads[0]
        wanted = torch.nonzero((grad_PK != 0).any(dim=1)).squeeze(1)
        d_hidden = torch.zeros_like(hidden_PH) if ctx.needs_input_grad[0] else None
        d_A = torch.zeros_like(A_RH) if A_RH is not None else None
        d_B = torch.zeros_like(B_VR) if B_VR is not None else None
        for start in range(0, wanted.shape[0], head.chunk):
            rows = wanted[start : start + head.chunk]
            temperature = None if temperature_P is None else temperature_P[rows]
            hidden = hidden_PH[rows]
            d_logits = _logit_gradient(_logits(hidden, head, temperature), targets_PK[rows], grad_PK[rows])
            if temperature is not None:
                d_logits.div_(temperature[:, None])
            d_rows = d_logits.to(head.weight_VH.dtype) @ head.weight_VH if d_hidden is not None else None
            if A_RH is not None and B_VR is not None and d_A is not None and d_B is not None:
                d_inner = (d_logits @ B_VR) * head.scale
                d_B += (d_logits.T @ (hidden.float() @ A_RH.T)) * head.scale
                d_A += d_inner.T @ hidden.float()
                if d_rows is not None:
                    d_rows = d_rows.float() + d_inner @ A_RH
            if d_hidden is not None and d_rows is not None:
                d_hidden[rows] = d_rows.to(d_hidden.dtype)
        return d_hidden, d_A, d_B, None, None, None


def _logit_gradient(logits: Tensor, targets_PK: Tensor, grad_PK: Tensor) -> Tensor:
    """Return the gradient of ``sum(grad * log_softmax(logits)[targets])``, ``[P, V]``; a target may occur twice."""
    gradient = torch.softmax(logits, dim=1).mul_(-grad_PK.sum(dim=1, keepdim=True))
    row = torch.arange(targets_PK.shape[0], device=targets_PK.device)
    for k in range(targets_PK.shape[1]):
        gradient[row, targets_PK[:, k]] += grad_PK[:, k]
    return gradient
