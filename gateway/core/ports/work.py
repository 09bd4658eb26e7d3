"""The trainer's side of the operation log: leases, claims and fenced writes."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from gateway.core.ids import OperationId, SessionId
from gateway.core.operations import Operation, Progress
from gateway.core.payloads import Payload
from gateway.core.results import Outcome, SaveResult
from gateway.core.sessions import ComputeRules, Session, Snapshot
from gateway.core.usage import UsageFact
from gateway.core.versions import NewVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to run a session. ``epoch`` is the fencing token: it grows with every new holder."""

    session_id: SessionId
    owner: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One operation to run now. ``losses`` counts the trainers that were lost while they ran it."""

    lease: Lease
    session: Session
    operation: Operation
    payload: Payload
    losses: int


class StaleLease(Exception):
    """Another trainer holds the session: whatever was computed under this lease must not be written."""


class WorkStore(Protocol):
    """The trainer's side of the log. Every write is fenced by the lease's epoch."""

    async def claim(
        self, *, owner: str, base_model: str, lease_s: float, at: datetime, resident: Collection[SessionId] = ()
    ) -> Work | None:
        """Lease the session that was served least recently among those with a ready operation, and start it.

        A session is free when nobody leases it, its lease has run out, or ``owner`` leases it (then the epoch stays).
        The ready operation is the one at ``applied_seq + 1`` (strict) or the lowest waiting one (ascending); one that
        a lost trainer left running is handed out again. The session's ``activity`` is as recorded.

        The operation of a session among ``resident`` begins with the claim; for others ``begin`` says when.
        """
        ...

    async def renew(self, *, owner: str, lease_s: float, at: datetime) -> Mapping[SessionId, int]:
        """Extend all leases of ``owner``; return the epoch of each session still held and still alive."""
        ...

    async def release(self, lease: Lease) -> None: ...

    async def give_back(self, work: Work) -> None:
        """Release the session with its operation not run: that is no loss. Raises StaleLease."""
        ...

    async def owners(self, base_model: str) -> Sequence[str]:
        """Return who holds leases of live sessions."""
        ...

    async def release_all(self, owner: str) -> int:
        """Give back every lease of an owner that is known to be dead; return how many there were."""
        ...

    async def recovering(self, lease: Lease, *, seq: int, losses: int) -> None:
        """Show that the session is being rebuilt and has come to ``seq``. Raises StaleLease."""
        ...

    async def begin(self, work: Work, *, rules: ComputeRules, made_with: Mapping[str, str], note: str | None) -> None:
        """The session is in memory and its operation starts now: from here on, a lost trainer counts against it.

        Ends ``recovering``; records the session's ``rules`` unless they are, and what its replay was.

        Raises:
            StaleLease: nothing was written.
        """
        ...

    async def set_progress(self, lease: Lease, operation_id: OperationId, progress: Progress) -> None:
        """Show how far a running operation has come. Written by nobody but the lease's holder, else ignored."""
        ...

    async def finish(
        self,
        lease: Lease,
        operation: Operation,
        outcome: Outcome,
        *,
        facts: Sequence[UsageFact],
        at: datetime,
    ) -> None:
        """Record an outcome, advance ``applied_seq``, count the optimizer step, set or clear ``window_broken_by``
        (set by a failed forward_backward, cleared by optim_step and load_state, also by failed ones).

        Raises:
            StaleLease: nothing was written.
        """
        ...

    async def stage(
        self, lease: Lease, operation: Operation, version: NewVersion, *, complete: bool, at: datetime
    ) -> SaveResult:
        """Register a staged version under the next number of its group and advance ``applied_seq``.

        With ``complete`` the operation completes now; else it stays running until the publish gate decides.

        Raises:
            StaleLease: nothing was written.
        """
        ...

    async def snapshot_taken(self, lease: Lease, snapshot: Snapshot, *, made_with: Mapping[str, str]) -> None:
        """Raises StaleLease."""
        ...

    async def fail_session(self, lease: Lease, reason: str, *, at: datetime) -> None:
        """End a session whose state cannot be rebuilt: its running operation fails, queued ones are skipped.

        Raises:
            StaleLease: nothing was written.
        """
        ...

    async def completed_after(self, session_id: SessionId, seq: int) -> Sequence[Operation]:
        """Completed forward_backward, optim_step and load_state operations after ``seq``, in order: what a replay
        runs. Outcomes are left out."""
        ...
