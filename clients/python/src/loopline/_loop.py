"""The one thread on which everything asynchronous runs, and the thin layer that lets synchronous code wait for it."""

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from loopline.errors import ClientStopped

T = TypeVar("T")


class BackgroundLoop:
    """An event loop on a daemon thread.

    ``on_close`` is awaited on the loop when it closes: at ``close``, when this object is collected, or at exit.
    """

    def __init__(self, on_close: Callable[[], Awaitable[None]]) -> None:
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_serve, args=(self._loop,), name="loopline", daemon=True)
        thread.start()
        self._finalizer = weakref.finalize(self, _close, self._loop, thread, on_close)

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin ``work`` and return at once. Work started from one thread begins in the order of the calls.

        Raises:
            ClientStopped: the loop is closed.
        """
        if self.closed:
            work.close()
            raise ClientStopped("the ServiceClient behind this call is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` and block for its result."""
        return self.start(work).result()

    async def run_async(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` and await its result from any other loop; it goes on when the awaiting task is cancelled."""
        return await asyncio.shield(asyncio.wrap_future(self.start(work)))

    def close(self) -> None:
        """Cancel what runs, await ``on_close`` and end the thread. Closing twice is fine."""
        self._finalizer()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _close(loop: asyncio.AbstractEventLoop, thread: threading.Thread, on_close: Callable[[], Awaitable[None]]) -> None:
    async def end() -> None:
        running = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await on_close()
        await loop.shutdown_default_executor()
        loop.stop()

    asyncio.run_coroutine_threadsafe(end(), loop)
    if threading.current_thread() is not thread:
        thread.join()
