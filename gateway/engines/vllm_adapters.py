"""Which versions one engine holds, and who may use them now.

Invariants: at most ``max_loras - 1`` distinct versions are in use at once; the last slot is that of publications, which
wait for each other and for nobody else; one version in use is loaded at a time; a version in use is never unloaded;
sessions take turns, and the versions of one session wait in the order they were first asked for.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from gateway.core.ids import SessionId, VersionId
from gateway.core.versions import CanaryReport, Occasion

Waiter = asyncio.Future[None]


class Turns:
    """Lets at most ``limit`` distinct versions in at once, fairly.

    Requests wait per version, versions per session. When somebody waits, a request for a version already in use waits
    too, so a busy session cannot keep others out; when room appears, the session whose turn it is enters with its
    version that waits longest and all requests for it, then goes to the back. A session with a hundred versions waits
    no less for each than one with a single version.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._using: Counter[VersionId] = Counter()
        self._waiting: OrderedDict[SessionId, OrderedDict[VersionId, list[Waiter]]] = OrderedDict()

    @property
    def distinct(self) -> int:
        """How many versions are in use."""
        return len(self._using)

    def in_use(self, version_id: VersionId) -> bool:
        """Say whether a request holds a turn of this version or waits for one."""
        return version_id in self._using or any(version_id in queues for queues in self._waiting.values())

    def holds(self, version_id: VersionId) -> bool:
        """Say whether a request holds a turn of this version."""
        return version_id in self._using

    def resize(self, limit: int) -> None:
        """Let ``limit`` versions in from now on; those that are in beyond it stay until they leave."""
        self._limit = limit
        self._let_in()

    @asynccontextmanager
    async def turn(self, version_id: VersionId, session_id: SessionId) -> AsyncGenerator[None]:
        """Hold one reference to ``version_id``, which ``session_id`` saved."""
        if self._waiting or not self._has_room(version_id):
            await self._wait(version_id, session_id)
        else:
            self._using[version_id] += 1
        try:
            yield
        finally:
            self._leave(version_id)

    def _has_room(self, version_id: VersionId) -> bool:
        return version_id in self._using or len(self._using) < self._limit

    async def _wait(self, version_id: VersionId, session_id: SessionId) -> None:
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(session_id, OrderedDict()).setdefault(version_id, []).append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._leave(version_id)  # let in and cancelled in the same moment
            else:
                self._give_up(version_id, session_id, waiter)
                self._let_in()
            raise

    def _give_up(self, version_id: VersionId, session_id: SessionId, waiter: Waiter) -> None:
        queues = self._waiting.get(session_id)
        if queues is None or waiter not in queues.get(version_id, ()):
            return
        queues[version_id].remove(waiter)
        if not queues[version_id]:
            del queues[version_id]
        if not queues:
            del self._waiting[session_id]

    def _leave(self, version_id: VersionId) -> None:
        self._using[version_id] -= 1
        if not self._using[version_id]:
            del self._using[version_id]
        self._let_in()

    def _let_in(self) -> None:
        """A version that is in use takes no room, so it may pass those for which there is none."""
        while self._waiting:
            session_id, queues = next(iter(self._waiting.items()))
            version_id = next(iter(queues))
            if not self._has_room(version_id):
                return
            waiters = queues.pop(version_id)
            if queues:
                self._waiting.move_to_end(session_id)
            else:
                del self._waiting[session_id]
            for waiter in waiters:
                if not waiter.done():
                    self._using[version_id] += 1
                    waiter.set_result(None)


class LoadedVersions:
    """The versions that passed the gate on one engine since it was last lost; least recently used first out."""

    def __init__(self, turns: Turns, *, capacity: int, unload: Callable[[VersionId], Awaitable[None]]) -> None:
        self._turns = turns
        self.capacity = capacity
        self._unload = unload
        self._reports: OrderedDict[VersionId, CanaryReport] = OrderedDict()
        self._loading, self._publishing = asyncio.Lock(), asyncio.Lock()
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

    async def ensure(
        self, version_id: VersionId, load: Callable[[], Awaitable[CanaryReport]], occasion: Occasion
    ) -> CanaryReport:
        """Return the report of ``version_id``, loading it through the gate (``load``) when it is not here.

        Whoever does not publish holds a turn. To verify, it goes through the gate in any case; whatever fails there is
        not held any more.
        """
        again = occasion is Occasion.VERIFY
        if not again and (report := self._touched(version_id)) is not None:
            return report
        async with self._publishing if occasion is Occasion.PUBLISH else self._loading:
            if not again and (report := self._touched(version_id)) is not None:
                return report
            self.forget(version_id)
            losses = self._losses
            report = await load()
            if losses == self._losses:
                self._reports[version_id] = report
                await self._shed(version_id)
            return report

    async def drop(self, version_id: VersionId) -> None:
        """Unload a version, unless it is in use."""
        async with self._publishing, self._loading:
            if not self._turns.in_use(version_id):
                self.forget(version_id)
                await self._unload(version_id)

    def _touched(self, version_id: VersionId) -> CanaryReport | None:
        if version_id in self._reports:
            self._reports.move_to_end(version_id)
        return self._reports.get(version_id)

    async def _shed(self, newest: VersionId) -> None:
        """Keep to the capacity. Versions that wait for a turn go last, and of them the one that was used last: its turn
        is the farthest, and then it comes back through the gate."""
        free = [one for one in self._reports if one != newest and not self._turns.holds(one)]
        idle = [one for one in free if not self._turns.in_use(one)]
        idle += [one for one in reversed(free) if self._turns.in_use(one)]
        for version_id in idle[: max(0, len(self._reports) - self.capacity)]:
            del self._reports[version_id]
            await self._unload(version_id)
