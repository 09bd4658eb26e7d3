"""The scripted model: what the scripted engine and the scripted trainer both compute, without weights.

A model is a text, its fingerprint. The base model's is ``"base"``; an adapter's stands in the file ``scripted.json``
of its directory: ``{"fingerprint": "..."}``. The log-probability of a token depends on the fingerprint, the token
before it and the token itself, so both sides agree on a canary exactly when they hold the same fingerprint.
"""

import hashlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

SCRIPTED_NAME = "scripted.json"
BASE_FINGERPRINT = "base"


def scripted_logprob(fingerprint: str, previous: int, token: int) -> float:
    """Return the log-probability of ``token`` after ``previous``: -2 < x <= -1, in steps of 0.001 nats."""
    digest = hashlib.sha256(f"{fingerprint}\n{previous}\n{token}".encode()).digest()
    return -(1 + int.from_bytes(digest[:8], "big") % 1000 / 1000)


def scripted_scores(fingerprint: str, tokens: Sequence[int]) -> tuple[float, ...]:
    """Return the log-probabilities of ``tokens[1:]``: what a canary of the scripted model records."""
    return tuple(scripted_logprob(fingerprint, previous, token) for previous, token in itertools.pairwise(tokens))


def scripted_file(fingerprint: str) -> bytes:
    """Return the content of ``scripted.json``."""
    return json.dumps({"fingerprint": fingerprint}, sort_keys=True).encode()


def read_fingerprint(directory: Path) -> str:
    """Return the fingerprint of the adapter in ``directory``.

    Raises:
        OSError, ValueError, KeyError: there is no readable ``scripted.json``.
    """
    fingerprint: str = json.loads((directory / SCRIPTED_NAME).read_bytes())["fingerprint"]
    return fingerprint
