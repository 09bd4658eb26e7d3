"""Which versions one engine holds, and who may use them now.

Invariants: at most ``max_loras - 1`` distinct versions are in use at once (a slot stays free for a publication);
one version is loaded at a time; a version in use is never unloaded; versions wait in the order they first asked.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from gateway.core.ids import VersionId
from gateway.core.versions import CanaryReport


class Turns:
    """Lets at most ``limit`` distinct versions in at once, fairly.

    Requests wait per version. When somebody waits, a request for a version already in use waits too, so a busy
    session cannot keep others out; when room appears, the version that waits longest enters with all its requests.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._using: Counter[VersionId] = Counter()
        self._waiting: OrderedDict[VersionId, list[asyncio.Future[None]]] = OrderedDict()

    def in_use(self, version_id: VersionId) -> bool:
        return version_id in self._using

    @asynccontextmanager
    async def turn(self, version_id: VersionId) -> AsyncGenerator[None]:
        """Hold one reference to ``version_id``."""
        if self._waiting or not self._has_room(version_id):
            await self._wait(version_id)
        else:
            self._using[version_id] += 1
        try:
            yield
        finally:
            self._leave(version_id)

    def _has_room(self, version_id: VersionId) -> bool:
        return version_id in self._using or len(self._using) < self._limit

    async def _wait(self, version_id: VersionId) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(version_id, []).append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._leave(version_id)  # let in and cancelled in the same moment
            elif (queue := self._waiting.get(version_id)) is not None:
                queue.remove(waiter)
                if not queue:
                    del self._waiting[version_id]
                self._let_in()
            raise

    def _leave(self, version_id: VersionId) -> None:
        self._using[version_id] -= 1
        if not self._using[version_id]:
            del self._using[version_id]
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting:
            version_id = next(iter(self._waiting))
            if not self._has_room(version_id):
                return
            for waiter in self._waiting.pop(version_id):
                if not waiter.done():
                    self._using[version_id] += 1
                    waiter.set_result(None)


class LoadedVersions:
    """The versions that passed the gate on one engine since it was last lost; least recently used first out."""

    def __init__(self, turns: Turns, *, capacity: int, unload: Callable[[VersionId], Awaitable[None]]) -> None:
        self._turns = turns
        self._capacity = capacity
        self._unload = unload
        self._reports: OrderedDict[VersionId, CanaryReport] = OrderedDict()
        self._loading = asyncio.Lock()
        self._losses = 0

    def __len__(self) -> int:
        return len(self._reports)

    def __contains__(self, version_id: VersionId) -> bool:
        return version_id in self._reports

    def forget(self, version_id: VersionId) -> None:
        """The engine says that it does not hold ``version_id``."""
        self._reports.pop(version_id, None)

    def forget_all(self) -> None:
        """The engine was lost: it may come back empty."""
        self._reports.clear()
        self._losses += 1

    async def ensure(self, version_id: VersionId, load: Callable[[], Awaitable[CanaryReport]]) -> CanaryReport:
        """Return the report of ``version_id``, loading it through the gate (``load``) when it is not here."""
        if (report := self._touched(version_id)) is not None:
            return report
        async with self._loading:
            if (report := self._touched(version_id)) is not None:
                return report
            losses = self._losses
            report = await load()
            if losses == self._losses:
                self._reports[version_id] = report
                await self._shed(version_id)
            return report

    def _touched(self, version_id: VersionId) -> CanaryReport | None:
        if version_id in self._reports:
            self._reports.move_to_end(version_id)
        return self._reports.get(version_id)

    async def _shed(self, newest: VersionId) -> None:
        idle = [one for one in self._reports if one != newest and not self._turns.in_use(one)]
        for version_id in idle[: max(0, len(self._reports) - self._capacity)]:
            del self._reports[version_id]
            await self._unload(version_id)
