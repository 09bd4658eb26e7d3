"""A result that is on its way: ``result()`` waits for it in synchronous code, ``await`` in asynchronous code.

The work goes on whether or not anybody waits: a wait that times out or is cancelled can simply be repeated.
"""

import asyncio
from collections.abc import Generator
from concurrent.futures import CancelledError, Future
from typing import Any, Generic, TypeVar

from loopline.errors import ClientStopped

T = TypeVar("T")

CLOSED = "the client was closed before the outcome was there; the gateway finishes what it has accepted"


class APIFuture(Generic[T]):
    """The outcome of one call. Outcomes are kept: every wait gives the same result or raises the same error."""

    def __init__(self, outcome: Future[T], operation_ids: Future[tuple[str, ...]], owner: object) -> None:
        self._outcome = outcome
        self._operation_ids = operation_ids
        self._owner = owner  # keeps the connection open while somebody may still wait
        outcome.add_done_callback(lambda done: _settle(operation_ids, done))

    def result(self, timeout: float | None = None) -> T:
        """Block for the result.

        Raises:
            TimeoutError: ``timeout`` seconds passed first; the work goes on.
            LooplineError: the call failed.
        """
        try:
            return self._outcome.result(timeout)
        except CancelledError:
            raise ClientStopped(CLOSED) from None

    async def result_async(self, timeout: float | None = None) -> T:  # noqa: ASYNC109 - the twin of result()
        """Await the result, from any event loop; raises as ``result``."""
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._outcome)), timeout)
        except asyncio.CancelledError:
            if self._outcome.cancelled():
                raise ClientStopped(CLOSED) from None
            raise  # not the work, but whoever waits for it, was cancelled

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    def done(self) -> bool:
        """Whether the outcome is here. Never blocks."""
        return self._outcome.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Block for the outcome and return its error, or None when it succeeded.

        Raises:
            TimeoutError: ``timeout`` seconds passed first.
        """
        try:
            return self._outcome.exception(timeout)
        except CancelledError:
            return ClientStopped(CLOSED)

    def cancel(self) -> bool:
        """Return False: what was called is carried out. Stop the session to end its queued work."""
        return False

    def cancelled(self) -> bool:
        """Return False, as ``cancel``."""
        return False

    @property
    def operation_ids(self) -> tuple[str, ...]:
        """Ids of the operations behind this call, in order: several for a batch that was cut. Blocks for the submit.

        Raises:
            LooplineError: the submit failed.
        """
        try:
            return self._operation_ids.result()
        except CancelledError:
            raise ClientStopped(CLOSED) from None

    @property
    def operation_id(self) -> str:
        """Id of the (last) operation behind this call; see ``operation_ids``."""
        return self.operation_ids[-1]


def _settle(operation_ids: "Future[tuple[str, ...]]", outcome: "Future[Any]") -> None:
    """A call that failed before it had ids will never have any."""
    if operation_ids.done():
        return
    if outcome.cancelled():
        operation_ids.cancel()
    else:
        operation_ids.set_exception(outcome.exception())
