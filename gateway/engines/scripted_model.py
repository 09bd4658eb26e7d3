"""What the scripted engine answers: tokens drawn from hashes, text one byte per token. Pure.

Log-probabilities are ``gateway.core.scripted``'s. A draw depends on the fingerprint, the prompt, the seed and the
position; temperature 0 ignores the seed. Token ids below 256 are bytes, others have no text; id 0 ends a sequence.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gateway.core.scripted import scripted_logprob

END = 0
_LETTERS = b"abcdefghijklmnopqrstuvwxyz     "


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One sequence to draw."""

    fingerprint: str
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    greedy: bool
    stop_token_ids: frozenset[int]
    stop: tuple[str, ...]
    ignore_end: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One token of a sequence; ``finish_reason`` and ``stop_reason`` are set on the last one, as vLLM spells them."""

    token: int
    logprob: float
    finish_reason: str | None
    stop_reason: int | str | None


def encode(text: str) -> list[int]:
    return list(text.encode())


def decode(tokens: Sequence[int]) -> str:
    return bytes(token for token in tokens if 0 < token < 256).decode(errors="replace")


def draw(request: Draw) -> Iterator[Drawn]:
    """Yield the tokens of a sequence, at least one."""
    start = hashlib.sha256(repr((request.fingerprint, request.prompt, 0 if request.greedy else request.seed)).encode())
    previous, text = request.prompt[-1], ""
    for position in range(request.max_tokens):
        step = start.copy()
        step.update(position.to_bytes(4, "big"))
        choice = int.from_bytes(step.digest()[:4], "big")
        token = END if choice % 64 == 0 and not request.ignore_end else _LETTERS[choice % len(_LETTERS)]
        text += decode([token])
        matched = next((stop for stop in request.stop if text.endswith(stop)), None)
        finish_reason, stop_reason = None, None
        if token == END and not request.ignore_end:
            finish_reason = "stop"
        elif token in request.stop_token_ids:
            finish_reason, stop_reason = "stop", token
        elif matched is not None:
            finish_reason, stop_reason = "stop", matched
        elif position + 1 == request.max_tokens:
            finish_reason = "length"
        yield Drawn(
            token=token,
            logprob=scripted_logprob(request.fingerprint, previous, token),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )
        if finish_reason is not None:
            return
        previous = token
