"""Opens transactions on the database that a URL names, durable or not at all.

``sqlite:///path`` serves one machine, ``postgresql+psycopg://...`` several. Both pass one suite.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from sqlalchemy import URL, Connection, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from gateway.core.bodies import Body
from gateway.core.clock import Clock, SystemClock
from gateway.core.disk import disk_full
from gateway.core.errors import Unavailable
from gateway.core.ids import ProjectId
from gateway.core.limits import Limits
from gateway.core.payloads import Payload
from gateway.core.ports import Wakeups
from gateway.store.blobs import prepare
from gateway.store.failures import is_away, is_full, was_abandoned
from gateway.store.no_ledger import NoLedger
from gateway.store.postgres import open_postgres
from gateway.store.schema import require_schema
from gateway.store.sqlite import open_sqlite
from gateway.store.transaction import Transaction
from gateway.store.trips import Work
from gateway.store.unfit import UnfitDatabase
from gateway.store.unit_of_work import LedgerFactory, SqlUnit

T = TypeVar("T")
SERVER_WAIT_S = 60.0  # how long a gateway or trainer that starts waits for its database server


class Transactions(Protocol):
    """What a backend provides."""

    @property
    def wakeups(self) -> Wakeups: ...

    @property
    def commits(self) -> int:
        """Durable commits of this process so far."""
        ...

    def read(self) -> AbstractAsyncContextManager[Transaction]: ...

    def write(self, *, durable: bool = True) -> AbstractAsyncContextManager[Transaction]: ...

    async def ask(self, work: Work[T]) -> T: ...

    async def glance(self, work: Work[T]) -> T: ...

    async def apply(self, work: Work[T], *, durable: bool = True) -> T: ...

    async def jot(self, work: Work[T]) -> T: ...


class SqlDatabase:
    """Database on SQL. ``wakeups`` tells when somebody, in any process, committed something worth a look."""

    def __init__(self, transactions: Transactions, ledger: LedgerFactory, limits: Limits, blob_dir: Path) -> None:
        self._transactions = transactions
        self._blob_dir = blob_dir
        self._limits = limits
        self._ledger = ledger

    @property
    def wakeups(self) -> Wakeups:
        return self._transactions.wakeups

    @property
    def commits(self) -> int:
        """Durable commits of this process so far; concurrent units share them on SQLite."""
        return self._transactions.commits

    @asynccontextmanager
    async def read(self) -> AsyncGenerator[SqlUnit]:
        """Open a consistent read; writing through it is a RuntimeError.

        Raises:
            Unavailable: the database is away.
        """
        with _translated():
            async with self._transactions.read() as transaction:
                yield self._unit(transaction)

    @asynccontextmanager
    async def write(self, *, durable: bool = True) -> AsyncGenerator[SqlUnit]:
        """Open a unit of work; leaving it normally returns when it is committed, and ``durable`` if asked for.

        Raises:
            Unavailable: the database is away, or could not commit; the same request may work later.
        """
        with _translated():
            async with self._transactions.write(durable=durable) as transaction:
                yield self._unit(transaction)

    async def prepare(self, project_id: ProjectId, payload: Payload) -> Body:
        """As the port says."""
        return await prepare(self._blob_dir, project_id, payload)

    async def ask(self, work: Callable[[SqlUnit], Awaitable[T]]) -> T:
        """Return what ``work`` reads; it must wait for nothing but its unit, and is then run in one go.

        Raises:
            Unavailable: the database is away.
        """
        with _translated():
            return await self._transactions.ask(lambda transaction: work(self._unit(transaction)))

    async def glance(self, work: Callable[[SqlUnit], Awaitable[T]]) -> T:
        """As ``ask``, for a few rows by their keys.

        Raises:
            Unavailable: the database is away.
        """
        with _translated():
            return await self._transactions.glance(lambda transaction: work(self._unit(transaction)))

    async def apply(self, work: Callable[[SqlUnit], Awaitable[T]], *, durable: bool = True) -> T:
        """Run ``work``, which must wait for nothing but its unit, as a unit of its own, in one go. When it raises,
        nothing was done; returning means what leaving ``write`` means. A cancelled caller may find it done.

        Raises:
            Unavailable: the database is away, or could not commit; the same request may work later.
        """
        with _translated():
            return await self._transactions.apply(lambda transaction: work(self._unit(transaction)), durable=durable)

    async def jot(self, work: Callable[[SqlUnit], Awaitable[T]]) -> T:
        """As ``apply``, not durable, for a few rows by their keys.

        Raises:
            Unavailable: the database is away, or could not commit; the same request may work later.
        """
        with _translated():
            return await self._transactions.jot(lambda transaction: work(self._unit(transaction)))

    def _unit(self, transaction: Transaction) -> SqlUnit:
        return SqlUnit(transaction, self._ledger, self._limits)

    async def look(self, work: Callable[[Connection], T]) -> T:
        """Run ``work``, which only reads, on the connection of a consistent read: for those with tables of their own.

        Raises:
            Unavailable: the database is away.
        """
        with _translated():
            return await self._transactions.ask(lambda transaction: transaction.look(work))

    async def change(self, work: Callable[[Connection], T], *, durable: bool = True) -> T:
        """Run ``work`` on the connection of a unit of its own.

        Raises:
            Unavailable: the database is away, or could not commit.
        """
        with _translated():
            return await self._transactions.apply(lambda transaction: transaction.change(work), durable=durable)


@contextmanager
def _translated() -> Generator[None]:
    """Turn "the database is away" into the core's word for it."""
    try:
        yield
    except OperationalError as error:
        if is_full(error):
            raise disk_full() from error
        if not is_away(error):
            raise
        raise Unavailable("the database is away; try again", code="database_unavailable") from error
    except (PoolTimeout, InternalError) as error:
        if isinstance(error, InternalError) and not was_abandoned(error):
            raise
        raise Unavailable("the database is away; try again", code="database_unavailable") from error


@asynccontextmanager
async def open_database(
    url: str,
    *,
    blob_dir: Path,
    clock: Clock | None = None,
    wait_s: float = 0.0,
    allow_weak_durability: bool = False,
    create: bool = False,
    ledger: LedgerFactory | None = None,
    limits: Limits | None = None,
) -> AsyncIterator[SqlDatabase]:
    """Connect to a migrated database (with ``create`` an empty one is migrated); large blobs go to files under
    ``blob_dir``.

    A server that is not up yet (it may be replaying its log after a crash) is waited for, ``wait_s`` seconds. With
    ``allow_weak_durability`` a server that may lose acknowledged commits is used all the same, with a warning. Without
    a ``ledger`` nothing is held and nothing can be asked about money; usage facts are recorded all the same.
    ``limits`` are what every project may have.

    Raises:
        Unavailable: the database is away.
        UnfitDatabase: the URL is of another kind or the file none of a database; as WeakDurability, the server or file
            would not keep what it acknowledges; as OtherSchema, its tables are not those of this code.
    """
    parsed = parse_url(url)
    clock = clock or SystemClock()
    if parsed.drivername == "sqlite":
        opened = open_sqlite(parsed, blob_dir=blob_dir, clock=clock, allow_weak=allow_weak_durability)
    else:
        opened = open_postgres(parsed, blob_dir=blob_dir, clock=clock, wait_s=wait_s, allow_weak=allow_weak_durability)
    async with AsyncExitStack() as stack:
        try:
            transactions = await stack.enter_async_context(opened)
        except DBAPIError as error:
            reason = f"the database cannot be opened: {str(error.orig).strip()}"
            if isinstance(error, OperationalError) and is_away(error):
                raise Unavailable(reason, code="database_unavailable") from error
            raise UnfitDatabase(reason) from error
        database = SqlDatabase(transactions, ledger or NoLedger, limits or {}, blob_dir)
        await require_schema(database, url, create=create)
        yield database


def parse_url(url: str) -> URL:
    """Raises UnfitDatabase: it is no URL, or of a database that cannot be used."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # ValueError: a port that is no number
        raise UnfitDatabase("database URL must be sqlite:///... or postgresql+psycopg://...") from None
    if parsed.drivername not in ("sqlite", "postgresql+psycopg"):
        raise UnfitDatabase(f"database URL must be sqlite:///... or postgresql+psycopg://..., not {parsed.drivername}")
    return parsed
