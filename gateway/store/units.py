"""What queues up for the group writer: a unit that its caller works in, and one that goes to the thread whole."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection

from gateway.core.disk import disk_full
from gateway.core.errors import Unavailable
from gateway.store.failures import is_full
from gateway.store.transaction import Transaction
from gateway.store.trips import InlineTransaction, Traveller


def _future() -> "asyncio.Future[Any]":
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False, kw_only=True)
class Unit:
    """One unit of work on its way through the writer."""

    lasting: bool = True  # must survive a loss of power
    turn: "asyncio.Future[Transaction]" = field(default_factory=_future)
    ended: "asyncio.Future[bool]" = field(default_factory=_future)  # True: keep what it did
    durable: "asyncio.Future[None]" = field(default_factory=_future)

    @property
    def over(self) -> bool:
        """Whether its caller has given it up."""
        return self.ended.done()

    def committed(self) -> None:
        if not self.durable.done():
            self.durable.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Let whatever the unit waits for raise."""
        refusal = _refusal(error)
        for waited in (self.turn, self.durable):
            if not waited.done():
                waited.set_exception(refusal)
                waited.exception()  # an abandoned unit must not log that nobody looked
                return


@dataclass(eq=False, kw_only=True)
class Trip:
    """One unit of work that goes to the thread whole."""

    traveller: Traveller
    lasting: bool = True
    begun: bool = False
    result: Any = None
    error: Exception | None = None
    outcome: "asyncio.Future[Any]" = field(default_factory=_future)

    @property
    def over(self) -> bool:
        """Whether its caller has given it up."""
        return self.outcome.done()

    def run(self, connection: Connection, transaction: InlineTransaction) -> bool:
        """Run under a savepoint, in the thread; return whether what it did is kept."""
        savepoint(connection)
        if not self.run_alone(transaction):
            undo_savepoint(connection)
            return False
        keep_savepoint(connection)
        return True

    def run_alone(self, transaction: InlineTransaction) -> bool:
        """Run as all there is in a transaction, in the thread; False: roll it back."""
        try:
            self.result = self.traveller.run(transaction)
        except Exception as error:
            self.error = error
            return False
        return True

    def committed(self) -> None:
        if self.error is not None:
            self.outcome.set_exception(self.error)
        else:
            self.outcome.set_result(self.result)

    def fail(self, error: BaseException) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(_refusal(error))


def _refusal(error: BaseException) -> Exception:
    refusal = (
        disk_full()
        if is_full(error)
        else Unavailable("the database could not commit; nothing was recorded", code="database_unavailable")
    )
    refusal.__cause__ = error
    return refusal


def savepoint(connection: Connection) -> None:
    connection.exec_driver_sql("SAVEPOINT unit")


def keep_savepoint(connection: Connection) -> None:
    connection.exec_driver_sql("RELEASE unit")


def undo_savepoint(connection: Connection) -> None:
    connection.exec_driver_sql("ROLLBACK TO unit")
    connection.exec_driver_sql("RELEASE unit")
