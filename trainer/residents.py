"""Which sessions are in memory, under which lease, and how far each has come. Least recently used first."""

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.core.ids import SessionId
from gateway.core.ports import Lease
from gateway.core.sessions import Snapshot

SNAPSHOT_PAYS_AFTER = 50  # a snapshot is worth its write when a replay would take this many times as long: 2 %
_FIRST_SNAPSHOT_S = 0.1


@dataclass(slots=True, kw_only=True)
class Resident:
    """``applied_seq`` is what memory holds; ``replay_s`` what it would take to rebuild that from ``snapshot``.

    ``snapshot_s`` is how long writing a snapshot takes; a guess before the first.
    """

    lease: Lease
    applied_seq: int
    snapshot: Snapshot | None
    replay_s: float = 0.0
    snapshot_s: float = _FIRST_SNAPSHOT_S

    def needs_snapshot(self, most_s: float) -> bool:
        """Whether rebuilding would take longer than ``most_s``, or long compared with what a snapshot costs."""
        return self.replay_s > min(most_s, SNAPSHOT_PAYS_AFTER * self.snapshot_s)


class Residents:
    """Bookkeeping only; the backend holds the state itself."""

    def __init__(self) -> None:
        self._by_id: dict[SessionId, Resident] = {}
        self._lost: set[tuple[SessionId, int]] = set()

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, resident: Resident) -> None:
        self._by_id[resident.lease.session_id] = resident

    def remove(self, session_id: SessionId) -> None:
        self._by_id.pop(session_id, None)

    def use(self, session_id: SessionId) -> Resident | None:
        """Return the resident and make it the most recently used."""
        resident = self._by_id.pop(session_id, None)
        if resident is not None:
            self._by_id[session_id] = resident
        return resident

    def oldest(self) -> Resident:
        return next(iter(self._by_id.values()))

    def all(self) -> list[Resident]:
        return list(self._by_id.values())

    def epochs(self) -> Mapping[SessionId, int]:
        return {session_id: resident.lease.epoch for session_id, resident in self._by_id.items()}

    def lost(self, session_id: SessionId, epoch: int) -> None:
        self._lost.add((session_id, epoch))

    def take_lost(self) -> list[SessionId]:
        """Return the residents whose lease was reported lost since the last call."""
        lost, self._lost = self._lost, set()
        epochs = self.epochs()
        return [session_id for session_id, epoch in lost if epochs.get(session_id) == epoch]
