"""The stores of one transaction that the edge uses: sessions, the operation log, keys, samples, usage."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from gateway.core.ids import KeyId, OperationId, ProjectId, SampleId, SessionId
from gateway.core.operations import Operation
from gateway.core.payloads import Payload
from gateway.core.principals import Key
from gateway.core.sessions import Session
from gateway.core.usage import UsageFact


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


class KeyStore(Protocol):
    """Projects and API keys."""

    async def ensure_project(self, name: str) -> ProjectId: ...

    async def ensure_house(self) -> None:
        """Make the project that the gateway's own usage belongs to."""
        ...

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

    async def of_source(self, source: str) -> Sequence[UsageFact]: ...


class LockStore(Protocol):
    """Named leases for singletons, e.g. the publisher."""

    async def hold(self, name: str, *, owner: str, lease_s: float, at: datetime) -> bool:
        """Take or extend the lock; False while somebody else holds it."""
        ...
