"""One answer per idempotency key for calls that run against an engine.

Within a process the second of two concurrent calls waits for the first; across processes and later, the stored answer
decides. An answer is stored in the transaction that records its usage, so it is paid for once.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.core.errors import Conflict
from gateway.core.ids import ProjectId
from gateway.core.ports import Database, StoredSample, UnitOfWork
from gateway.core.records import digest


class FirstAnswers:
    """The calls in flight under an idempotency key."""

    def __init__(self) -> None:
        self._locks: dict[tuple[ProjectId, str], asyncio.Lock] = {}
        self._users: Counter[tuple[ProjectId, str]] = Counter()

    @asynccontextmanager
    async def turn(self, project_id: ProjectId, key: str | None) -> AsyncIterator[None]:
        """Hold the key for the length of one call; without a key there is nothing to wait for."""
        if key is None:
            yield
            return
        name = (project_id, key)
        lock = self._locks.setdefault(name, asyncio.Lock())
        self._users[name] += 1
        try:
            async with lock:
                yield
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name], self._locks[name]


def request_digest(route: str, body: bytes) -> str:
    """Return what says that two requests ask the same."""
    return digest(route.encode() + b"\n" + body)


async def stored_answer(database: Database, project_id: ProjectId, key: str | None, asked: str) -> bytes | None:
    """Return the first answer to ``key``, in the dialect's own bytes, if there is one.

    Raises:
        Conflict: ``idempotency_key_reused``, the key was used for another request.
    """
    if key is None:
        return None
    async with database.read() as unit:
        return _checked(await unit.samples.by_idempotency_key(project_id, key), asked)


async def keep_answer(unit: UnitOfWork, project_id: ProjectId, sample: StoredSample) -> bytes:
    """Store ``sample`` as the answer to its key and return it, or the one that another process stored meanwhile.

    Raises:
        Conflict: as ``stored_answer``.
    """
    if await unit.samples.add(project_id, sample):
        return sample.content
    earlier = _checked(await unit.samples.by_idempotency_key(project_id, sample.key), sample.request_digest)
    return sample.content if earlier is None else earlier


def reused() -> Conflict:
    """Return the refusal of a key that comes back with another request."""
    return Conflict(
        "this Idempotency-Key was already used for another request",
        code="idempotency_key_reused",
        field="Idempotency-Key",
    )


def _checked(sample: StoredSample | None, asked: str) -> bytes | None:
    if sample is None:
        return None
    if sample.request_digest != asked:
        raise reused()
    return sample.content
