"""What the driver saw, in the order it saw it: a history as Jepsen keeps them. Pure but for appending to its file.

An *invoke* is answered by at most one of *ok* (a definite yes), *fail* (a definite no) and *unknown* (a reply that
never came, or a 5xx: the effect may or may not be there).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any


class Kind(StrEnum):
    INVOKE = "invoke"
    OK = "ok"
    FAIL = "fail"
    UNKNOWN = "unknown"
    NOTE = "note"  # a fault, a restart


class Call(StrEnum):
    """What was invoked."""

    OPEN = "open"
    SUBMIT = "submit"
    POLL = "poll"  # of another dialect, before the result is read
    FUTURE = "future"  # of Tinker's, whose answers have no status
    RESULT = "result"
    SAMPLE = "sample"
    FAULT = "fault"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """``at`` is seconds since the run began; ``subject`` a session's name, a sample's key or a fault."""

    at: float
    kind: Kind
    call: Call
    subject: str
    seq: int = 0
    value: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledged:
    """An operation the server said it had."""

    session: str
    seq: int
    id: str


@dataclass(kw_only=True)
class History:
    """Append-only; every event is on disk before the next call."""

    path: Path | None = None
    events: list[Event] = field(default_factory=list[Event])

    def add(self, event: Event) -> None:
        self.events.append(event)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(asdict(event)) + "\n")

    def of(self, kind: Kind, call: Call) -> Iterator[Event]:
        return (event for event in self.events if event.kind is kind and event.call is call)

    def acknowledged(self) -> Sequence[Acknowledged]:
        """Every operation id the server ever named, once per answer."""
        return [
            Acknowledged(session=event.subject, seq=event.seq, id=event.value["id"])
            for event in self.of(Kind.OK, Call.SUBMIT)
        ]

    def results(self) -> Mapping[tuple[str, int], Any]:
        """The final operation documents by session name and seq."""
        return {(event.subject, event.seq): event.value for event in self.of(Kind.OK, Call.RESULT)}

    def samples(self) -> Mapping[str, Any]:
        """The answers by sampling key."""
        return {event.subject: event.value for event in self.of(Kind.OK, Call.SAMPLE)}

    def count(self, kind: Kind) -> int:
        return sum(event.kind is kind for event in self.events)


def contradictions(history: History) -> list[str]:
    """Return where the server contradicted itself: two ids or two results for one operation, another status in
    another dialect, a second answer to one sampling key, a definite refusal.
    """
    found = [
        f"{event.subject}/{event.seq}: {event.call.value} was refused for good: {event.value}"
        for event in history.events
        if event.kind is Kind.FAIL
    ]
    ids: dict[tuple[str, int], str] = {}
    for ack in history.acknowledged():
        first = ids.setdefault((ack.session, ack.seq), ack.id)
        if first != ack.id:
            found.append(f"{ack.session}/{ack.seq}: acknowledged as {first} and as {ack.id}")
    finals: dict[tuple[str, int], Any] = {}
    for event in history.of(Kind.OK, Call.RESULT):
        first_result = finals.setdefault((event.subject, event.seq), stable(event.value))
        if first_result != stable(event.value):
            found.append(f"{event.subject}/{event.seq}: two different results")
    for event in history.of(Kind.OK, Call.POLL):
        seen = finals.get((event.subject, event.seq))
        if seen is not None and seen["status"] != event.value:
            found.append(f"{event.subject}/{event.seq}: one dialect says {event.value}, another {seen['status']}")
    answers: dict[str, Any] = {}
    for event in history.of(Kind.OK, Call.SAMPLE):
        if answers.setdefault(event.subject, event.value) != event.value:
            found.append(f"{event.subject}: two different answers to one sampling key")
    return found


_VOLATILE = frozenset({"id", "session_id", "created_at", "started_at", "finished_at", "version_id"})


def stable(document: Any) -> Any:
    """Return a result without what differs between two equal runs: ids and times."""
    if isinstance(document, dict):
        return {name: stable(value) for name, value in document.items() if name not in _VOLATILE}
    if isinstance(document, list):
        return [stable(value) for value in document]
    return document
