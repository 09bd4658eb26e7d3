"""Streamed answers as server-sent events.

What was consumed is durable before the client sees the end: the chunk that finishes the last sequence is held back
until its usage is stored. A stream that ends early, because the client left or the engine failed, is billed once, for
what the engine had produced by then, to the token: the engine is told to abort, and its stream is read to the end. A
failure in mid-stream is a last frame ``data: {"error": ...}``, without ``[DONE]``: that is what clients look for.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any, Protocol

import anyio
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from gateway.core.costs import cost_nanos
from gateway.core.counts import Counting
from gateway.core.errors import GatewayError, Unavailable
from gateway.core.sampling import TokenCounts
from gateway.wire.insisting import to_its_end
from gateway.wire.metering import give_up, hold, record, warning_headers
from gateway.wire.openai.admission import Admission, Admitted
from gateway.wire.openai.pump import Pump

PING_S = 15


class Reading(Protocol):
    """What a route makes of an engine's chunks."""

    @property
    def counts(self) -> Counting: ...

    def frames(self, chunk: Mapping[str, Any]) -> Iterable[ServerSentEvent]: ...

    def end(self, counts: TokenCounts | None, cost_nanos: int) -> Iterable[ServerSentEvent]:
        """Return what follows the last chunk once the usage is stored."""
        ...

    def failure(self, error: GatewayError) -> ServerSentEvent: ...


async def streamed(admission: Admission, admitted: Admitted, reading: Reading) -> EventSourceResponse:
    """Return the response; a refusal before the first chunk is an ordinary error.

    Raises:
        OutOfBudget, Invalid, Unavailable: there is no money left; the engine refused or is away.
    """
    notices = await hold(admission.database, admitted.call)
    stream = Stream(admission, admitted, reading)
    frames = stream.frames()
    try:
        first = await anext(frames)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await frames.aclose()
        raise
    return _Response(first, frames, {**admitted.headers, **warning_headers(notices)})


class _Response(EventSourceResponse):
    """Closes its frames when it is over, also where it was cut off between two of them: a generator that is merely
    dropped ends when garbage is collected, which may be never."""

    def __init__(
        self, first: ServerSentEvent, frames: AsyncGenerator[ServerSentEvent], headers: Mapping[str, str]
    ) -> None:
        super().__init__(_after(first, frames), headers=headers, ping=PING_S, sep="\n")
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            with anyio.CancelScope(shield=True):
                await self._frames.aclose()


async def _after(first: ServerSentEvent, rest: AsyncGenerator[ServerSentEvent]) -> AsyncGenerator[ServerSentEvent]:
    yield first
    async for frame in rest:
        yield frame


class Stream:
    """One streamed answer: from the engine's chunks to frames and, once, to usage."""

    def __init__(self, admission: Admission, admitted: Admitted, reading: Reading) -> None:
        self._admission = admission
        self._admitted = admitted
        self._reading = reading
        self._recorded = False

    async def frames(self) -> AsyncGenerator[ServerSentEvent]:
        """Yield the frames. However this ends, the engine has stopped and what it did is recorded."""
        admission, admitted, stop = self._admission, self._admitted, asyncio.Event()
        reading, counting = self._reading, self._reading.counts
        upstream = admission.engines.stream(admitted.target, admitted.route, {**admitted.body, "stream": True}, stop)
        pump = Pump(upstream, stop, lambda answer: counting.observe(answer.engine, answer.document))
        held: list[ServerSentEvent] = []
        started = False
        try:
            async for chunk in pump.chunks():
                for frame in reading.frames(chunk):
                    if counting.ended:
                        held.append(frame)
                        continue
                    started = True
                    yield frame
            if not counting.ended:
                raise Unavailable("the engine ended the stream too early", code="engine_aborted")
            counts, cost = await self._record(billed=True)
            started = True
            for frame in (*held, *reading.end(counts, cost)):
                yield frame
        except GatewayError as error:
            with anyio.CancelScope(shield=True):
                await pump.finish()
                await self._record(billed=started)  # a client that gets nothing but an error pays nothing
            if not started:
                raise
            yield reading.failure(error)
        finally:
            with anyio.CancelScope(shield=True):
                await pump.finish()
                await self._record(billed=True)

    async def _record(self, *, billed: bool) -> tuple[TokenCounts | None, int]:
        """Record what was consumed, the first time that this is called; return it with its price.

        Shielded: a client that leaves while the end of its stream is being stored would otherwise not be billed.
        """
        counts = self._reading.counts.counts()
        if self._recorded:
            return counts, 0
        self._recorded = True
        database, call = self._admission.database, self._admitted.call
        if counts is None:
            await to_its_end(lambda: give_up(database, call, refused=False))
            return None, 0
        if call.scoring:
            counts = counts.without_sampled()
        now = self._admission.clock.now()
        facts = call.facts(counts if billed else counts.unbilled(), now)
        await to_its_end(lambda: database.apply(lambda unit: record(unit, call, facts, at=now)))
        return counts, cost_nanos(self._admission.prices, facts)
