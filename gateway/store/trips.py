"""Units of work that go to a thread once.

The stores are asynchronous because a statement may be a trip to a thread or a server. Work that waits for nothing but
its unit can be taken to where the connection is and run there from its first statement to its last: one trip instead
of one for each statement.
"""

from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection

from gateway.core.clock import Clock
from gateway.store.transaction import Transaction

T = TypeVar("T")
Work = Callable[[Transaction], Awaitable[T]]


class InlineTransaction(Transaction):
    """A SQLite transaction whose statements run where they are called."""

    def __init__(self, connection: Connection, *, clock: Clock, blob_dir: Path, read_only: bool) -> None:
        super().__init__(None, postgres=False, clock=clock, blob_dir=blob_dir, read_only=read_only)
        self._here = connection

    async def _run(self, work: Callable[[Connection], T]) -> T:
        return work(self._here)


class Traveller:
    """Work on its way to a thread, with the context (the request that log lines name) of who sent it."""

    def __init__(self, work: Work[T]) -> None:
        self._work = work
        self._context: Context = copy_context()

    def run(self, transaction: InlineTransaction) -> object:
        return self._context.run(finished, self._work(transaction))


def finished(work: Awaitable[T]) -> T:
    """Run ``work`` to its end, here and now.

    Raises:
        RuntimeError: it waits for something else than its unit.
    """
    steps = work.__await__()
    try:
        next(steps)
    except StopIteration as end:
        return end.value
    raise RuntimeError("work that is run in one go waits for something")
