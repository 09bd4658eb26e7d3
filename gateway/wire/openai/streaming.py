"""Streamed answers as server-sent events.

What was consumed is durable before the client sees the end: the chunk that finishes the last sequence is held back
until its usage is stored. A stream that ends early, because the client left or the engine failed, is billed once, for
what the engine had produced by then. A failure in mid-stream is a last frame ``data: {"error": ...}``, without
``[DONE]``, because that is what clients look for.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

import anyio
import orjson
from sse_starlette import EventSourceResponse, ServerSentEvent

from gateway.core.errors import GatewayError, Unavailable
from gateway.core.sampling import TokenCounts
from gateway.wire.metering import record_alone, sampling_facts
from gateway.wire.openai.admission import Admission, Admitted
from gateway.wire.openai.errors import error_body
from gateway.wire.openai.translate import chunk_choice, counts_of, envelope, usage

PING_S = 15
DONE = ServerSentEvent(data="[DONE]", sep="\n")


class Tally:
    """What a stream has produced so far: the engine's own total once it is there, else the token ids seen."""

    def __init__(self, admitted: Admitted) -> None:
        self._prompt = admitted.prompt_tokens
        self._cached = 0
        self._sampled: dict[int, int] = {}
        self._total: TokenCounts | None = None
        self._finished = 0
        self._sequences = admitted.sequences

    def observe(self, chunk: Mapping[str, Any]) -> None:
        choices = _choices(chunk)
        usage: Mapping[str, Any] | None = chunk.get("usage")
        if not choices:
            self._total = counts_of(usage) if usage else self._total
            return
        for choice in choices:
            index: int = choice["index"]
            before = self._sampled.get(index, 0)
            if choice.get("token_ids") is not None:
                self._sampled[index] = before + len(choice["token_ids"])
            elif usage:
                self._sampled[index] = max(before, counts_of(usage).sampled)
            self._finished += choice.get("finish_reason") is not None
        if usage:
            self._cached = counts_of(usage).cached

    @property
    def finished(self) -> bool:
        """Whether every sequence has ended."""
        return self._finished >= self._sequences

    def counts(self) -> TokenCounts | None:
        """Return the counts, or None when the engine has produced nothing at all."""
        if self._total is not None:
            return self._total
        if not self._sampled:
            return None
        return TokenCounts(prompt=self._prompt, cached=self._cached, sampled=sum(self._sampled.values()))


async def streamed(admission: Admission, admitted: Admitted) -> EventSourceResponse:
    """Return the response; a refusal before the first chunk is an ordinary error.

    Raises:
        Invalid, Unavailable: the engine refused or is away.
    """
    frames = _frames(admission, admitted)
    first = await anext(frames)
    return EventSourceResponse(_after(first, frames), headers=admitted.headers, ping=PING_S, sep="\n")


async def _after(first: ServerSentEvent, rest: AsyncGenerator[ServerSentEvent]) -> AsyncGenerator[ServerSentEvent]:
    try:
        yield first
        async for frame in rest:
            yield frame
    finally:
        with anyio.CancelScope(shield=True):
            await rest.aclose()


async def _frames(admission: Admission, admitted: Admitted) -> AsyncGenerator[ServerSentEvent]:
    tally = Tally(admitted)
    shared = envelope(admitted, int(admission.clock.now().timestamp()), chunk=True)
    if admitted.include_usage:
        shared["usage"] = None
    upstream = admission.engines.stream(admitted.target, admitted.route, {**admitted.body, "stream": True})
    seen: set[int] = set()
    held: list[ServerSentEvent] = []
    started = recorded = False
    try:
        async for chunk in upstream:
            tally.observe(chunk)
            for choice in _choices(chunk):
                first = choice["index"] not in seen
                seen.add(choice["index"])
                rendered = _frame({**shared, "choices": [chunk_choice(admitted, choice, first=first)]})
                if tally.finished:
                    held.append(rendered)
                    continue
                started = True
                yield rendered
        counts = await _record(admission, admitted, tally)
        recorded = True
        if counts is None or not tally.finished:
            raise Unavailable("the engine ended the stream too early", code="engine_aborted")
        started = True
        for frame in held:
            yield frame
        if admitted.include_usage:
            yield _frame({**shared, "choices": [], "usage": usage(counts)})
        yield DONE
    except GatewayError as error:
        if not started:
            recorded = True  # the client gets an error and nothing else: there is nothing to pay for
            raise
        if not recorded:
            recorded = True
            await _record(admission, admitted, tally)
        yield _frame(error_body(error))
    finally:
        with anyio.CancelScope(shield=True):
            await _close(upstream)
            if not recorded:
                await _record(admission, admitted, tally)


async def _record(admission: Admission, admitted: Admitted, tally: Tally) -> TokenCounts | None:
    counts = tally.counts()
    if counts is None:
        return None
    now = admission.clock.now()
    facts = sampling_facts(
        counts,
        sample_id=admitted.sample_id,
        principal=admission.principal,
        session_id=admitted.session_id,
        target=admitted.target,
        at=now,
    )
    await record_alone(admission.database, facts, session_id=admitted.session_id, at=now)
    return counts


def _choices(chunk: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return chunk.get("choices") or ()


async def _close(upstream: AsyncIterator[Mapping[str, Any]]) -> None:
    if isinstance(upstream, AsyncGenerator):
        await upstream.aclose()


def _frame(document: Mapping[str, Any]) -> ServerSentEvent:
    return ServerSentEvent(data=orjson.dumps(document).decode(), sep="\n")
