"""Whose call an engine works on next: projects share it evenly, by tokens.

While there is room nobody waits. When there is none, start-time fair queueing: a project's call starts at a virtual
time, the later of where its last one ended and where the newest call that was let in started, and ends as many tokens
later as it can take at most; the project that ended first is next. So a flood of one delays another by what is already
inside and by no more than its own calls in turn.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from gateway.core.ids import ProjectId


@dataclass(slots=True, kw_only=True, eq=False)
class _Asked:
    """A call: how many sequences it is, and the tokens that it can take at most."""

    sequences: int
    tokens: int
    entered: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(slots=True)
class _Line:
    """The calls of one project that wait, and the virtual time at which its last one ended."""

    ended: int = 0
    waiting: deque[_Asked] = field(default_factory=deque[_Asked])


class FairGate:
    """Lets calls of ``capacity`` sequences in at once. A call of more than that enters when it is alone."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._inside = 0
        self._now = 0
        self._lines: dict[ProjectId | None, _Line] = {}

    @property
    def waiting(self) -> int:
        return sum(len(line.waiting) for line in self._lines.values())

    @asynccontextmanager
    async def turn(self, project_id: ProjectId | None, *, sequences: int, tokens: int) -> AsyncGenerator[None]:
        """Hold room for a call of ``project_id``."""
        asked = _Asked(sequences=sequences, tokens=tokens)
        line = self._lines.setdefault(project_id, _Line())
        line.waiting.append(asked)
        self._let_in()
        try:
            await asked.entered
            yield
        finally:
            if asked.entered.done() and not asked.entered.cancelled():
                self._inside -= sequences
            elif asked in line.waiting:
                line.waiting.remove(asked)
            self._let_in()

    def _let_in(self) -> None:
        while lines := [line for line in self._lines.values() if line.waiting]:
            line = min(lines, key=lambda line: line.ended)
            asked = line.waiting[0]
            if asked.entered.cancelled():  # and its caller has not noticed it yet
                line.waiting.popleft()
                continue
            if self._inside and self._inside + asked.sequences > self._capacity:
                break
            line.waiting.popleft()
            self._inside += asked.sequences
            self._now = max(line.ended, self._now)
            line.ended = self._now + asked.tokens
            asked.entered.set_result(None)
        self._forget()

    def _forget(self) -> None:
        """A project that waits for nothing and is behind would start at ``now`` anyway."""
        for project_id in [one for one, line in self._lines.items() if not line.waiting and line.ended <= self._now]:
            del self._lines[project_id]
