"""When to try again, and how long to wait: exponential backoff with full jitter, bounded by a deadline.

Retrying is safe here because every request that does work carries a key under which the gateway does it once.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx

RETRYABLE_STATUSES = frozenset({408, 429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How patient a client is with a gateway that is away.

    The n-th wait is drawn from 0 to ``min(cap_s, base_s * 2^n)`` seconds, and is never shorter than the gateway's
    ``Retry-After`` (itself cut to ``cap_s``). No try starts later than ``give_up_after_s`` after the first.
    ``clock`` (seconds, monotonic), ``sleep`` and ``uniform`` (a float from 0 to 1) are the outside world.
    """

    base_s: float = 0.25
    cap_s: float = 8.0
    give_up_after_s: float = 300.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    uniform: Callable[[], float] = random.random

    async def answer(
        self, attempt: Callable[[], Awaitable[httpx.Response]], on_wait: Callable[[str], None]
    ) -> "Answer":
        """Call ``attempt`` until it answers with anything that is not worth another try.

        Returns the last answer, a retryable one too when time is up. ``on_wait`` hears why before the first wait.

        Raises:
            httpx.TransportError: time is up and the last try got no answer.
        """
        started, tries, ambiguous = self.clock(), 0, False
        while True:
            retry_after_s = 0.0
            try:
                response = await attempt()
            except httpx.TransportError as error:
                # Only a connection that never came about proves that nothing arrived.
                ambiguous = ambiguous or not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                if not self._again(started):
                    raise
                trouble = f"no answer ({error or type(error).__name__})"
            else:
                if response.status_code not in RETRYABLE_STATUSES:
                    return Answer(response, ambiguous)
                ambiguous = ambiguous or response.status_code != 429
                if not self._again(started):
                    return Answer(response, ambiguous)
                trouble = f"status {response.status_code}"
                retry_after_s = _seconds(response.headers.get("Retry-After"))
            if tries == 0:
                on_wait(trouble)
            await self.sleep(max(min(retry_after_s, self.cap_s), self._backoff_s(tries)))
            tries += 1

    def _backoff_s(self, tries: int) -> float:
        return self.uniform() * min(self.cap_s, self.base_s * 2.0 ** min(tries, 30))

    def _again(self, started: float) -> bool:
        return self.clock() - started < self.give_up_after_s


@dataclass(frozen=True, slots=True)
class Answer:
    """A response; ``ambiguous`` when an earlier (or this) try may have been carried out without our knowing."""

    response: httpx.Response
    ambiguous: bool


def _seconds(header: str | None) -> float:
    """Return Retry-After's seconds; a date or nothing counts as 0."""
    return float(header) if header is not None and header.isdecimal() else 0.0
