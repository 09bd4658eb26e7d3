"""The one thread in which everything that computes runs, so that the event loop never waits for it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

T = TypeVar("T")


class Kernels:
    """Calls one after the other in one thread. A context manager; leaving it waits for the thread's end."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kernels")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def run(self, call: Callable[[], T]) -> T:
        """Return what ``call`` returns; a cancelled caller does not stop it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)
