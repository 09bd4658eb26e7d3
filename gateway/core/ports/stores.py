"""The stores of one transaction that the edge uses: sessions, the operation log, keys, samples, usage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from gateway.core.clients import Seat
from gateway.core.ids import ClientId, KeyId, OperationId, ProjectId, SampleId, SessionId
from gateway.core.operations import Operation
from gateway.core.payloads import OperationKind, Payload
from gateway.core.principals import Key
from gateway.core.sessions import LoraConfig, Session
from gateway.core.usage import UsageFact


class SessionStore(Protocol):
    """Sessions of a project. A stranger's session is NotFound, like a missing one."""

    async def add(self, session: Session, *, idempotency_key: str | None, request_digest: str) -> None:
        """Record a new session.

        Raises:
            Conflict: the project already has a live session of that name.
            QuotaFull: the project or the key has as many live sessions as it may.
        """
        ...

    async def by_idempotency_key(self, project_id: ProjectId, key: str) -> tuple[Session, str] | None:
        """Return the session that was created with ``key`` and the digest of its request."""
        ...

    async def get(self, project_id: ProjectId, session_id: SessionId) -> Session: ...

    async def by_name(self, project_id: ProjectId, name: str) -> Session | None:
        """Return the newest session of that name that was not removed, live ones first."""
        ...

    async def by_seat(self, project_id: ProjectId, seat: Seat) -> tuple[Session, str] | None:
        """Return the session that sits there and the digest of the request that opened it."""
        ...

    async def of_client(self, project_id: ProjectId, client_id: ClientId) -> Sequence[Session]:
        """By number."""
        ...

    async def count(self, project_id: ProjectId) -> int: ...

    async def page(
        self, project_id: ProjectId, *, limit: int, after: SessionId | None, offset: int = 0
    ) -> Sequence[Session]:
        """Newest first; ``after`` is the last id of the previous page, ``offset`` leaves out so many."""
        ...

    async def touch(self, session_id: SessionId, at: datetime) -> None:
        """Record use: idle expiry counts from here."""
        ...

    async def stop(self, project_id: ProjectId, session_id: SessionId, at: datetime) -> Session:
        """Skip what is queued; stopped at once, or stopping until the running operation ends. Idempotent."""
        ...

    async def remove(self, project_id: ProjectId, session_id: SessionId, at: datetime) -> None:
        """Take an ended session out of every list and give its name away; what it saved and cost stays. Idempotent.

        Raises:
            Conflict: ``session_running``, it has not ended.
        """
        ...

    async def adopt(self, session_id: SessionId, lora: LoraConfig) -> Session:
        """Give a session another LoRA configuration, before its first operation."""
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

    async def highest_seq(self, session_id: SessionId) -> int:
        """Return the highest seq that a session was ever sent; 0: none."""
        ...

    async def final_among(self, ids: Sequence[OperationId]) -> Sequence[OperationId]:
        """Return those of ``ids`` that are final. One query for all waiters."""
        ...

    async def refuse(self, session: Session, key_id: KeyId, seq: int, kind: OperationKind) -> None:
        """Record that ``seq`` was refused: it is consumed and blocks nobody. A refused forward_backward leaves the
        gradient window incomplete."""
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

    async def projects(self) -> Mapping[ProjectId, str]:
        """Return the names of all projects, oldest first."""
        ...

    async def create_project(self, name: str) -> ProjectId:
        """Raises Conflict: ``project_exists``."""
        ...

    async def expire(self, key_id: KeyId, at: datetime) -> Key:
        """Let a key end at ``at``, or when it ends anyway if that is earlier. Raises NotFound."""
        ...

    async def revoke(self, key_id: KeyId, at: datetime) -> Key:
        """Raises NotFound. Revoking twice keeps the first time."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample:
    """The first answer to an idempotency key. ``content`` is the dialect's own bytes."""

    id: SampleId
    key: str
    request_digest: str
    content: bytes

    @property
    def final(self) -> bool:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningSample:
    """A sampling call under an idempotency key that ``owner`` runs; ``lost`` once it was taken from its owner."""

    id: SampleId
    key: str
    request_digest: str
    owner: str
    lost: bool = False

    @property
    def final(self) -> bool:
        return self.lost


class SampleStore(Protocol):
    """Sampling calls that carried an idempotency key: those that run, and their answers, kept 24 h."""

    async def by_idempotency_key(self, project_id: ProjectId, key: str) -> StoredSample | None: ...

    async def add(self, project_id: ProjectId, sample: StoredSample) -> bool:
        """Store an answer; False: another one is there under its key, and stays."""
        ...

    async def get(self, project_id: ProjectId, sample_id: SampleId) -> StoredSample | RunningSample:
        """Raises NotFound: there is none, or it was answered more than 24 h ago."""
        ...

    async def begin(
        self, project_id: ProjectId, sample: RunningSample, *, lease_s: float
    ) -> RunningSample | StoredSample:
        """Record a call that is about to run under its idempotency key; return the one that runs there already, or
        the answer that is there, if so."""
        ...

    async def end(self, project_id: ProjectId, sample_id: SampleId, content: bytes, *, owner: str) -> bool:
        """Store the answer of a call that ``owner`` runs, once; False: it is lost, and nothing was stored."""
        ...

    async def renew(self, ids: Sequence[SampleId], *, owner: str, lease_s: float) -> None:
        """Say that ``owner`` still runs the calls; those that are lost stay lost."""
        ...

    async def lose(self, *, expired_by: datetime) -> Sequence[SampleId]:
        """Take the calls whose lease had run out by then from their owners, for good; return them."""
        ...

    async def final_among(self, ids: Sequence[SampleId]) -> Sequence[SampleId]:
        """Return those of ``ids`` that are answered or lost."""
        ...

    async def forget_lost(self, *, older_than: datetime) -> None:
        """Delete calls that were lost before ``older_than``."""
        ...


class UsageStore(Protocol):
    """Usage facts. Adding the same (source, meter) twice records it once."""

    async def add(self, facts: Sequence[UsageFact]) -> None: ...

    async def of_source(self, source: str) -> Sequence[UsageFact]: ...


class LockStore(Protocol):
    """Named leases for singletons, e.g. the publisher."""

    async def hold(self, name: str, *, owner: str, lease_s: float, at: datetime) -> bool:
        """Take or extend the lock; False while somebody else holds it."""
        ...
