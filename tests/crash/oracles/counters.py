"""Billed against computed: the engine's own journal of tokens, held against the usage facts of sampling calls."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from tests.crash.history import History
from tests.crash.oracles.sql import rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Of one sampling call."""

    prompt: int
    sampled: int


def journal(path: Path) -> list[Tokens]:
    """Read what the engine computed; a line that a kill cut short was never answered."""
    found: list[Tokens] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        found.append(Tokens(prompt=entry["prompt"], sampled=entry["sampled"]))
    return found


def violations(connection: Connection, history: History, path: Path, *, exact: bool) -> list[str]:
    """Each key is billed once, for what its answer says, and never for more than the engine computed.

    With ``exact`` (no engine or gateway was killed) both sums are equal.
    """
    theirs = "source LIKE 'smp-%' AND project_id <> 'proj-house'"
    billed = _billed(rows(connection, f"SELECT source, meter, quantity FROM usage_facts WHERE {theirs}"))
    return _compare(billed, history.samples(), journal(path), exact=exact)


def _billed(facts: Sequence[Mapping[str, Any]]) -> dict[str, Tokens]:
    meters: dict[str, Counter[str]] = {}
    for fact in facts:
        meters.setdefault(fact["source"], Counter())[fact["meter"]] += fact["quantity"]
    return {
        source: Tokens(prompt=count["prefill"] + count["cached_prefill"], sampled=count["sample"])
        for source, count in meters.items()
    }


def _compare(
    billed: Mapping[str, Tokens], answers: Mapping[str, Any], computed: Sequence[Tokens], *, exact: bool
) -> list[str]:
    found: list[str] = []
    answered = {answer["id"]: answer for answer in answers.values()}
    for source in billed.keys() - answered.keys():
        found.append(f"{source}: billed {billed[source]}, and nobody was answered")
    for source, answer in answered.items():
        usage = answer["usage"]
        said = Tokens(prompt=usage["prefill"] + usage["cached_prefill"], sampled=usage["sample"])
        drawn = sum(len(sequence["tokens"]) for sequence in answer["sequences"])
        if billed.get(source) != said or said.sampled != drawn:
            found.append(f"{source}: billed {billed.get(source)}, told {said}, {drawn} tokens received")
    excess = Counter(billed.values()) - Counter(computed)
    found += [f"billed {tokens} {count} times more than computed" for tokens, count in excess.items()]
    if exact and Counter(billed.values()) != Counter(computed):
        found.append(f"computed and not billed: {Counter(computed) - Counter(billed.values())}")
    return found
