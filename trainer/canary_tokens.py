"""Which tokens a canary is made of: the ends of sequences the session trained on lately, else a fixed pattern.

A sequence's end is where the trained positions are, so where an adapter differs most from its base.
"""

from collections.abc import Sequence

MAX_SEQUENCES = 4
MIN_TOKENS = 32
MAX_TOKENS = 64


def from_sequences(sequences: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return up to 4 sequences of at most 64 tokens; short ones are joined until they reach 32 or run out."""
    chosen: list[tuple[int, ...]] = []
    pending: list[int] = []
    for sequence in sequences:
        pending.extend(sequence[-MAX_TOKENS:])
        if len(pending) >= MIN_TOKENS:
            chosen.append(tuple(pending[-MAX_TOKENS:]))
            pending = []
        if len(chosen) == MAX_SEQUENCES:
            break
    if not chosen and len(pending) >= 2:
        chosen.append(tuple(pending))
    return tuple(dict.fromkeys(chosen))


def fixed(vocab_size: int, context_length: int) -> tuple[tuple[int, ...], ...]:
    """Return two deterministic sequences that spread over the vocabulary."""
    length = max(2, min(48, context_length))
    return tuple(
        tuple((start + step * position) % vocab_size for position in range(length))
        for start, step in ((vocab_size // 3, 7919), (vocab_size // 2, 104729))
    )
