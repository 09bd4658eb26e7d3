"""Transactions, and being told that one committed."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeVar

from gateway.core.bodies import Body
from gateway.core.ids import ProjectId
from gateway.core.payloads import Payload
from gateway.core.ports.audit import AuditStore
from gateway.core.ports.clients import ClientStore
from gateway.core.ports.collection import CollectionStore
from gateway.core.ports.content import BlobStore
from gateway.core.ports.ledger import Ledger
from gateway.core.ports.limits import LimitStore
from gateway.core.ports.registry import Registry, Upkeep, VersionStore
from gateway.core.ports.scores import ScoreStore, ScoreWorkStore
from gateway.core.ports.stores import (
    KeyStore,
    LockStore,
    OperationStore,
    SampleStore,
    SessionStore,
    UsageStore,
)
from gateway.core.ports.work import WorkStore

T = TypeVar("T")


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
    def registry(self) -> Registry: ...
    @property
    def upkeep(self) -> Upkeep: ...
    @property
    def keys(self) -> KeyStore: ...
    @property
    def samples(self) -> SampleStore: ...
    @property
    def clients(self) -> ClientStore: ...
    @property
    def usage(self) -> UsageStore: ...
    @property
    def work(self) -> WorkStore: ...
    @property
    def scores(self) -> ScoreStore: ...
    @property
    def score_work(self) -> ScoreWorkStore: ...
    @property
    def locks(self) -> LockStore: ...
    @property
    def collection(self) -> CollectionStore: ...
    @property
    def limits(self) -> LimitStore: ...
    @property
    def audit(self) -> AuditStore: ...
    @property
    def ledger(self) -> Ledger: ...


class Database(Protocol):
    """Opens transactions."""

    def read(self) -> AbstractAsyncContextManager[UnitOfWork]:
        """A consistent read; writing through it is an error."""
        ...

    def write(self, *, durable: bool = True) -> AbstractAsyncContextManager[UnitOfWork]:
        """Leaving normally commits before control returns; leaving by an exception rolls back.

        What was committed survives a loss of power, except when it need not be ``durable``: then it survives the
        death of any process, and is cheaper.
        """
        ...

    async def prepare(self, project_id: ProjectId, payload: Payload, /) -> Body:
        """Encode what will be submitted and, when it is large, write its file durably, before a unit is open.

        Raises:
            Unavailable: the disk is full.
        """
        ...

    async def ask(self, work: Callable[[UnitOfWork], Awaitable[T]], /) -> T:
        """Return what ``work`` reads. It waits for nothing but its unit, and may run in another thread."""
        ...

    async def glance(self, work: Callable[[UnitOfWork], Awaitable[T]], /) -> T:
        """As ``ask``, for a few rows by their keys: where the database is a file they are read here and now, which
        takes less than going to a thread."""
        ...

    async def apply(self, work: Callable[[UnitOfWork], Awaitable[T]], /, *, durable: bool = True) -> T:
        """Run ``work`` as ``write`` would; much cheaper where the database is a file. It waits for nothing but its
        unit, and may run in another thread. When it raises, nothing was done; a cancelled caller may find it done."""
        ...

    async def jot(self, work: Callable[[UnitOfWork], Awaitable[T]], /) -> T:
        """As ``apply``, not durable, for a few rows by their keys: where the database is a file and nothing else is
        being written it is done here and now."""
        ...


class Wakeups(Protocol):
    """One source of "something was committed", for this process and the others."""

    async def wait(self, seen: int, timeout_s: float, *, patient: bool = False) -> int:
        """Return as soon as the change counter differs from ``seen``, or after ``timeout_s``; returns the counter.

        Who is ``patient`` may hear of what other processes did some 50 ms later: looking for it costs less then.
        """
        ...
