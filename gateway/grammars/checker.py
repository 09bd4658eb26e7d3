"""Asks the child process; starts it at the first question, and again when it is gone."""

import asyncio
import re
import sys
from collections import OrderedDict
from contextlib import suppress
from types import TracebackType
from typing import Self

import orjson
import structlog

from gateway.core.errors import Invalid, Unavailable
from gateway.core.ports import Constraint
from gateway.grammars.child import WALL_S

START_S = 120.0  # the library's imports take seconds, on a busy machine many
ANSWER_S = WALL_S + 5.0
AT_ONCE = 4
REMEMBERED = 1024
_PLACE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+?:\d+: ")  # where in the library's source: nobody's business


class GrammarChecker:
    """The Grammars port. Use as an async context manager."""

    def __init__(self) -> None:
        self._child: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._waiting: dict[int, asyncio.Future[str | None]] = {}
        self._number = 0
        self._known: OrderedDict[tuple[Constraint, str], str | None] = OrderedDict()
        self._log = structlog.stdlib.get_logger("gateway.grammars")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._child is not None:
            with suppress(ProcessLookupError):
                self._child.kill()
            await self._child.wait()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    async def check(self, kind: Constraint, text: str, *, field: str) -> None:
        asked = (kind, text)
        if asked not in self._known:
            async with self._slots:
                self._known[asked] = await self._ask(kind, text)
        self._known.move_to_end(asked)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        if (error := self._known[asked]) is not None:
            raise Invalid(f"{field}: {_PLACE.sub('', error)}", code="invalid_grammar", field=field)

    async def _ask(self, kind: Constraint, text: str) -> str | None:
        child = await self._running()
        self._number += 1
        number = self._number
        answered = self._waiting[number] = asyncio.get_running_loop().create_future()
        assert child.stdin is not None
        try:
            child.stdin.write(orjson.dumps({"id": number, "kind": kind.value, "text": text}) + b"\n")
            await child.stdin.drain()
            return await asyncio.wait_for(answered, ANSWER_S)
        except (TimeoutError, OSError):
            with suppress(ProcessLookupError):
                child.kill()
            raise _away() from None
        finally:
            self._waiting.pop(number, None)

    async def _running(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._child is None or self._child.returncode is not None:
                self._child = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "gateway.grammars.child"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                )
                ready = self._waiting[0] = asyncio.get_running_loop().create_future()
                self._reading = asyncio.create_task(self._read(self._child), name="grammars")
                try:
                    await asyncio.wait_for(ready, START_S)
                except TimeoutError:
                    self._child.kill()
                    raise _away() from None
            return self._child

    async def _read(self, child: asyncio.subprocess.Process) -> None:
        assert child.stdout is not None
        async for line in child.stdout:
            said = orjson.loads(line)
            waiting = self._waiting.pop(said["id"], None)
            if waiting is not None and not waiting.done():
                waiting.set_result(said["error"])
        self._log.warning("grammar_checker_ended", status=await child.wait())
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(_away())


def _away() -> Unavailable:
    return Unavailable("grammars cannot be checked at the moment", code="grammar_checker_away")
