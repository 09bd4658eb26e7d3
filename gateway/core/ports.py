"""What the core needs from the world. ``store`` and ``engines`` implement these; tests use shipped fakes.

A ``UnitOfWork`` is one transaction: everything done through its stores commits together or not at all, and is
durable when ``Database.write`` has been left. No unit is held while waiting for an engine, a trainer or a client.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from gateway.core.catalog import BaseModel
from gateway.core.ids import KeyId, OperationId, ProjectId, SampleId, SessionId, VersionId
from gateway.core.manifest import Manifest
from gateway.core.operations import Operation, Progress
from gateway.core.payloads import Payload
from gateway.core.principals import Key
from gateway.core.results import Failure, Outcome, SaveResult
from gateway.core.sampling import Generation, SampleRequest, Target
from gateway.core.sessions import Activity, Session, Snapshot
from gateway.core.usage import UsageFact, UsageTotal
from gateway.core.versions import CanaryReport, Group, NewVersion, Version


class BlobStore(Protocol):
    """Tenant content by (project, sha256). Small blobs live in the database, larger ones in files, fsynced first."""

    async def put(self, project_id: ProjectId, content: bytes) -> str:
        """Store ``content`` and return its digest; storing it again is free."""
        ...

    async def get(self, project_id: ProjectId, digest: str) -> bytes:
        """Raises NotFound when there is no such blob in the project."""
        ...

    async def put_payload(self, project_id: ProjectId, payload: Payload) -> str: ...

    async def get_payload(self, project_id: ProjectId, digest: str) -> Payload: ...


class SessionStore(Protocol):
    """Sessions of a project. A stranger's session is NotFound, like a missing one."""

    async def add(self, session: Session, *, idempotency_key: str | None, request_digest: str) -> None:
        """Raises Conflict when the project already has a live session of that name."""
        ...

    async def by_idempotency_key(self, project_id: ProjectId, key: str) -> tuple[Session, str] | None:
        """Return the session that was created with ``key`` and the digest of its request."""
        ...

    async def get(self, project_id: ProjectId, session_id: SessionId) -> Session: ...

    async def by_name(self, project_id: ProjectId, name: str) -> Session | None:
        """Return the newest session of that name, live ones first."""
        ...

    async def page(self, project_id: ProjectId, *, limit: int, after: SessionId | None) -> Sequence[Session]:
        """Newest first; ``after`` is the last id of the previous page."""
        ...

    async def touch(self, session_id: SessionId, at: datetime) -> None:
        """Record use: idle expiry counts from here."""
        ...

    async def stop(self, project_id: ProjectId, session_id: SessionId, at: datetime) -> Session:
        """Skip what is queued; stopped at once, or stopping until the running operation ends. Idempotent."""
        ...

    async def expire_due(self, at: datetime) -> Sequence[SessionId]:
        """Expire every session whose time is over, skipping its queued operations."""
        ...


class OperationStore(Protocol):
    """The operation log: reorder buffer, retry table and result store."""

    async def add(
        self,
        *,
        session: Session,
        key_id: KeyId,
        seq: int | None,
        payload: Payload,
        digest: str,
        idempotency_key: str | None,
    ) -> Operation:
        """Append. ``seq`` None takes the number after the highest one known (1 for the first)."""
        ...

    async def get(self, project_id: ProjectId, operation_id: OperationId) -> Operation:
        """Raises NotFound. Final operations carry their outcome."""
        ...

    async def by_seq(self, session_id: SessionId, seq: int) -> Operation | None: ...

    async def by_idempotency_key(self, project_id: ProjectId, key: str) -> Operation | None: ...

    async def page(
        self, project_id: ProjectId, session_id: SessionId, *, limit: int, after_seq: int
    ) -> Sequence[Operation]:
        """By seq; outcomes are left out (None)."""
        ...

    async def final_among(self, ids: Sequence[OperationId]) -> Sequence[OperationId]:
        """Return those of ``ids`` that are final. One query for all waiters."""
        ...

    async def fail_gaps(self, *, older_than: datetime) -> Sequence[OperationId]:
        """Fail operations that have waited for a missing seq since before ``older_than``, naming that seq."""
        ...


class VersionStore(Protocol):
    """Model package groups and versions."""

    async def get(self, project_id: ProjectId, version_id: VersionId) -> Version: ...

    async def by_address(self, project_id: ProjectId, group: str, number: int) -> Version: ...

    async def page(
        self, project_id: ProjectId, *, group: str | None, limit: int, after: VersionId | None
    ) -> Sequence[Version]:
        """Newest first."""
        ...

    async def groups(self, project_id: ProjectId) -> Sequence[Group]: ...

    async def awaiting_publication(self, limit: int) -> Sequence[Version]:
        """Staged adapters whose save_weights operation is still running, oldest first."""
        ...

    async def publish(self, version_id: VersionId, report: CanaryReport, *, at: datetime) -> None:
        """Mark published and, if it contains a later seq than the present one, make it its session's latest version.

        A running save_weights operation of this version completes in the same transaction.
        """
        ...

    async def reject(self, version_id: VersionId, failure: Failure, *, at: datetime) -> None:
        """Mark rejected; its running save_weights operation fails with ``failure``; latest stays."""
        ...


class KeyStore(Protocol):
    """Projects and API keys."""

    async def ensure_project(self, name: str) -> ProjectId: ...

    async def add(self, key: Key) -> None: ...

    async def get(self, key_id: KeyId) -> Key | None: ...

    async def all(self) -> Sequence[Key]: ...

    async def revoke(self, key_id: KeyId, at: datetime) -> Key:
        """Raises NotFound. Revoking twice keeps the first time."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample:
    """The first answer to an idempotency key. ``content`` is the dialect's own bytes."""

    id: SampleId
    request_digest: str
    content: bytes


class SampleStore(Protocol):
    """Answers to sampling calls that carried an idempotency key, kept 24 h."""

    async def by_idempotency_key(self, project_id: ProjectId, key: str) -> StoredSample | None: ...

    async def add(self, project_id: ProjectId, key: str, sample: StoredSample) -> None: ...


class UsageStore(Protocol):
    """Usage facts. Adding the same (source, meter) twice records it once."""

    async def add(self, facts: Sequence[UsageFact]) -> None: ...

    async def totals(
        self,
        project_id: ProjectId,
        *,
        session_id: SessionId | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> Sequence[UsageTotal]: ...

    async def of_source(self, source: str) -> Sequence[UsageFact]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to run a session. ``epoch`` is the fencing token: it grows with every new holder."""

    session_id: SessionId
    owner: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One operation to run now. ``attempts`` counts claims, this one included."""

    lease: Lease
    session: Session
    operation: Operation
    payload: Payload
    attempts: int


class StaleLease(Exception):
    """Another trainer holds the session: whatever was computed under this lease must not be written."""


class WorkStore(Protocol):
    """The trainer's side of the log. Every write is fenced by the lease's epoch."""

    async def claim(self, *, owner: str, base_model: str, lease_s: float, at: datetime) -> Work | None:
        """Lease the session that was served least recently among those with a ready operation, and start it.

        A session is free when nobody leases it, its lease has run out, or ``owner`` leases it (then the epoch stays).
        The ready operation is the one at ``applied_seq + 1`` (strict) or the lowest waiting one (ascending); one that
        a lost trainer left running is handed out again. The session's ``activity`` is as recorded.
        """
        ...

    async def renew(self, *, owner: str, lease_s: float, at: datetime) -> Mapping[SessionId, int]:
        """Extend all leases of ``owner``; return the epoch of each session still held and still alive."""
        ...

    async def release(self, lease: Lease) -> None: ...

    async def set_activity(self, lease: Lease, activity: Activity) -> None:
        """Raises StaleLease."""
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

    async def snapshot_taken(self, lease: Lease, snapshot: Snapshot) -> None:
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


class LockStore(Protocol):
    """Named leases for singletons, e.g. the publisher."""

    async def hold(self, name: str, *, owner: str, lease_s: float, at: datetime) -> bool:
        """Take or extend the lock; False while somebody else holds it."""
        ...


class UnitOfWork(Protocol):
    """One transaction's stores."""

    @property
    def blobs(self) -> BlobStore: ...
    @property
    def sessions(self) -> SessionStore: ...
    @property
    def operations(self) -> OperationStore: ...
    @property
    def versions(self) -> VersionStore: ...
    @property
    def keys(self) -> KeyStore: ...
    @property
    def samples(self) -> SampleStore: ...
    @property
    def usage(self) -> UsageStore: ...
    @property
    def work(self) -> WorkStore: ...
    @property
    def locks(self) -> LockStore: ...


class Database(Protocol):
    """Opens transactions."""

    def read(self) -> AbstractAsyncContextManager[UnitOfWork]:
        """A consistent read; writing through it is an error."""
        ...

    def write(self) -> AbstractAsyncContextManager[UnitOfWork]:
        """Leaving normally commits durably before control returns; leaving by an exception rolls back."""
        ...


class Wakeups(Protocol):
    """One source of "something was committed", for this process and the others."""

    async def wait(self, seen: int, timeout_s: float) -> int:
        """Return as soon as the change counter differs from ``seen``, or after ``timeout_s``; returns the counter."""
        ...


class Artifacts(Protocol):
    """Directories of saved versions and snapshots, under names the store makes."""

    def path(self, location: str) -> Path: ...

    def verify(self, location: str, manifest_sha256: str) -> Manifest:
        """Re-hash manifest and files.

        Raises:
            CorruptArtifact: something is missing or differs.
        """
        ...


class CorruptArtifact(Exception):
    """A stored artefact is not what its manifest says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """One engine replica as the pool sees it."""

    url: str
    ready: bool
    adapters: int


class Engines(Protocol):
    """All engines of all base models. Versions are loaded on demand through the gate, under never-reused names.

    Every method raises Unavailable (retryable) when the engine is away or dies midway, and Invalid when the engine
    refuses the request; no answer is ever computed by other weights than the target's.
    """

    async def generate(self, target: Target, request: SampleRequest) -> Generation: ...

    async def complete(self, target: Target, route: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """POST an OpenAI body (without ``model``) to the engine's ``/v1/{route}`` and return its JSON answer."""
        ...

    def stream(self, target: Target, route: str, body: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        """As ``complete``, streamed: yields the decoded JSON chunks. Closing the iterator aborts the engine's work."""
        ...

    async def tokenize(self, target: Target, body: Mapping[str, Any]) -> Sequence[int]:
        """Return the token ids the engine would see for an OpenAI chat or completion body."""
        ...

    async def publish(self, version: Version) -> CanaryReport:
        """Load ``version`` in every engine that must serve it and judge its canary there.

        Raises:
            CanaryMismatch, CorruptArtifact: the version must be rejected.
            Unavailable: try again later.
        """
        ...

    async def health(self, base: BaseModel) -> Sequence[EngineHealth]: ...


class Prices(Protocol):
    """Prices usage; implemented by billing."""

    def cost_nanos(self, *, base_model: str, meter: str, quantity: int, at: datetime) -> int:
        """Return the price in nano-USD. Raises KeyError when no price is valid then: never a silent zero."""
        ...
