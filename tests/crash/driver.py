"""The client: submits a plan's operations over several connections, retries blindly, waits, samples, writes it down.

Every operation carries its ``seq``, so a retry is safe, and the server must see to it that it is. Up to a window of
operations of a session are under way at once and arrive in any order.
"""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import httpx

from tests.crash.history import Call, Event, History, Kind
from tests.crash.plan import Plan
from tests.crash.sessions import SESSIONS, Read
from tests.wire.signing import Signed

STUCK_S = 120.0
_PAUSE_S = (0.02, 0.2)


class Stuck(Exception):
    """A call had no definite answer, or nothing of a session became final, for ``STUCK_S`` seconds."""


def _any(_: Any) -> bool:
    return True


def _whole(answer: Any) -> Any:
    return answer


class Driver:
    """Runs one plan against one address.

    ``final`` counts operations whose result is known; ``calm`` is set by whoever strikes, when the strikes are over,
    and ``going`` while operations may be submitted.
    ``excused`` says until when (monotonic) nobody could expect an answer: patience begins there.
    """

    def __init__(
        self,
        *,
        url: str,
        key: str,
        base_model: str,
        history: History,
        seed: int,
        excused: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.final = 0
        self.calm = asyncio.Event()
        self.going = asyncio.Event()
        self.going.set()
        self.base_model = base_model
        self.url = url
        self.signed = Signed(key)
        headers = {"Authorization": f"Bearer {key}", "X-API-Key": key}
        self._client = httpx.AsyncClient(base_url=url, headers=headers, timeout=30.0, trust_env=False)
        self._history = history
        self._excused = excused
        self._rng = random.Random(seed)
        self._started = time.monotonic()

    def note(self, subject: str, value: Any = None) -> None:
        """Write down what is done to the stack."""
        self._record(Kind.NOTE, Call.FAULT, subject, 0, value)

    def answered(self, subject: str, answer: Any) -> None:
        """Write down a sample that was asked for and fetched by two calls."""
        self._record(Kind.OK, Call.SAMPLE, subject, 0, answer)

    def request(self, method: str, path: str, **parts: Any) -> httpx.Request:
        return self._client.build_request(method, path, **parts)

    async def run(self, plan: Plan) -> None:
        """Return when every operation is final and every sample answered.

        Raises:
            ExceptionGroup of Stuck: a future did not end.
        """
        async with self._client, asyncio.TaskGroup() as tasks:
            for session in plan.sessions:
                tasks.create_task(SESSIONS[session.dialect](self, session).run(), name=session.name)

    async def call(
        self,
        request: httpx.Request,
        call: Call,
        subject: str,
        seq: int = 0,
        *,
        read: Read = httpx.Response.json,
        accept: Callable[[Any], bool] = _any,
        keep: Callable[[Any], Any] = _whole,
        alive_at: Callable[[], float] | None = None,
        known: frozenset[int] = frozenset(),
    ) -> Any:
        """Send ``request`` until there is a definite answer that ``accept`` takes; None when it is a refusal.

        Args:
            read: makes a document of the answer.
            keep: makes of the document what the history keeps.
            alive_at: when (monotonic) the session last made progress; patience is counted from there.
            known: statuses that are answers, too.

        Raises:
            Stuck: see there.
        """
        began = time.monotonic()
        while True:
            self._record(Kind.INVOKE, call, subject, seq)
            try:
                auth = self.signed if "/sagemaker/" in request.url.path else None
                response = await self._client.send(request, auth=auth)
            except httpx.TransportError as error:
                self._record(Kind.UNKNOWN, call, subject, seq, type(error).__name__)
            else:
                if response.status_code < 300 or response.status_code in known:
                    if accept(document := read(response)):
                        return self._record(Kind.OK, call, subject, seq, keep(document))
                elif response.status_code < 500 and response.status_code != 429:
                    self._record(Kind.FAIL, call, subject, seq, response.text)
                    return None
                else:
                    self._record(Kind.UNKNOWN, call, subject, seq, f"{response.status_code} {response.text[:300]}")
            if time.monotonic() - max(began, alive_at() if alive_at else 0.0, self._excused()) > STUCK_S:
                raise Stuck(f"{subject}/{seq}: {call.value} has had no answer for {STUCK_S:g} s")
            await asyncio.sleep(self._rng.uniform(*_PAUSE_S))

    def _record(self, kind: Kind, call: Call, subject: str, seq: int, value: Any = None) -> Any:
        at = time.monotonic() - self._started
        self._history.add(Event(at=at, kind=kind, call=call, subject=subject, seq=seq, value=value))
        if kind is Kind.OK and call is Call.RESULT:
            self.final += 1
        return value
