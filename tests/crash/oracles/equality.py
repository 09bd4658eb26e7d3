"""Two runs of one plan, held against each other to the bit."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.crash.history import History, stable
from tests.crash.oracles.sql import connected, final_file
from tests.crash.plan import Plan

if TYPE_CHECKING:
    from tests.crash.oracles.reference import Reference  # imports torch

_NUMBERS = frozenset({"version", "number"})  # what a save is called depends on the saves before it
_COMPARED = ("kind", "status", "result", "usage", "cost_nanos")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run came to, but for frail operations. ``states`` are the sha256 of final weights and moments."""

    results: dict[str, Any]
    samples: dict[str, Any]
    states: dict[str, str]


def outcome_of(url: str, plan: Plan, history: History, artifacts: Path) -> Outcome:
    """Read a finished run."""
    frail = {(session.name, step.seq) for session in plan.sessions for step in session.steps if step.frail}
    results = {
        f"{session}/{seq}": {
            **{name: _comparable(document[name], numbered=not frail) for name in _COMPARED},
            "error": (document["error"] or {}).get("code"),
        }
        for (session, seq), document in history.results().items()
        if (session, seq) not in frail
    }
    samples = {key: stable(answer["sequences"]) for key, answer in history.samples().items()}
    base = {sample.key for session in plan.sessions for sample in session.samples if sample.version is None}
    with connected(url) as connection:
        states = {
            session.name: hashlib.sha256(
                final_file(connection, session.name, session.final_state, artifacts, "state.safetensors").read_bytes()
            ).hexdigest()
            for session in plan.sessions
        }
    return Outcome(results=results, samples={key: samples[key] for key in base if key in samples}, states=states)


def _comparable(value: Any, *, numbered: bool) -> Any:
    value = stable(value)
    if isinstance(value, dict) and not numbered:
        return {name: part for name, part in value.items() if name not in _NUMBERS}
    return value


def differences(ours: Outcome, quiet: Outcome) -> list[str]:
    """Return where a run with faults differs from the uninterrupted one."""
    found = [
        f"{session}: final weights or moments differ from the uninterrupted run's"
        for session, state in quiet.states.items()
        if ours.states.get(session) != state
    ]
    for name, expected in (quiet.results | quiet.samples).items():
        seen = (ours.results | ours.samples).get(name)
        if seen != expected:
            found.append(f"{name}: {str(seen)[:300]} is not the uninterrupted run's {str(expected)[:300]}")
    return found


def probe_distance(plan: Plan, history: History, references: "Mapping[str, Reference]") -> dict[str, float]:
    """Return, by session, the largest difference between its probe and the reference's, in nats."""
    results = history.results()
    distances: dict[str, float] = {}
    for session in plan.sessions:
        outputs = results[session.name, session.probe.seq]["result"]["loss_fn_outputs"]
        distances[session.name] = max(
            abs(ours - theirs)
            for output, reference in zip(outputs, references[session.name].probe, strict=True)
            for ours, theirs in zip(output["logprobs"]["data"], reference, strict=True)
        )
    return distances


def sample_distance(plan: Plan, history: History, references: "Mapping[str, Reference]") -> dict[str, float]:
    """Return, by sampling key, how far its tokens' log-probabilities are from the version's that was asked, in nats.

    A real engine's only: the scripted one makes its log-probabilities up.
    """
    answers = history.samples()
    return {
        sample.key: max(
            abs(ours - theirs)
            for sequence in answers[sample.key]["sequences"]
            for ours, theirs in zip(
                sequence["logprobs"],
                references[session.name].logprobs(sample.after, sample.body["prompt"], sequence["tokens"]),
                strict=True,
            )
        )
        for session in plan.sessions
        for sample in session.samples
    }
