"""The frames of streamed completions and chat completions."""

from collections.abc import Iterable, Mapping
from typing import Any

import orjson
from sse_starlette import ServerSentEvent

from gateway.core.counts import StreamCounts
from gateway.core.errors import GatewayError
from gateway.core.sampling import TokenCounts
from gateway.wire.openai.admission import Admitted
from gateway.wire.openai.errors import error_body
from gateway.wire.openai.translate import chunk_choice, envelope, usage

DONE = ServerSentEvent(data="[DONE]", sep="\n")


class ChoiceChunks:
    """Reads chunks of choices."""

    def __init__(self, admitted: Admitted, created: int) -> None:
        self.counts = StreamCounts(admitted.prompts, admitted.samples)
        self._admitted = admitted
        self._shared = envelope(admitted, created, chunk=True)
        if admitted.include_usage:
            self._shared["usage"] = None
        self._seen: set[int] = set()

    def frames(self, chunk: Mapping[str, Any]) -> Iterable[ServerSentEvent]:
        for choice in chunk.get("choices") or ():
            first = choice["index"] not in self._seen
            self._seen.add(choice["index"])
            yield _frame({**self._shared, "choices": [chunk_choice(self._admitted, choice, first=first)]})

    def end(self, counts: TokenCounts | None, cost_nanos: int) -> Iterable[ServerSentEvent]:
        if self._admitted.include_usage and counts is not None:
            yield _frame({**self._shared, "choices": [], "usage": usage(counts, cost_nanos)})
        yield DONE

    def failure(self, error: GatewayError) -> ServerSentEvent:
        return _frame(error_body(error))


def _frame(document: Mapping[str, Any]) -> ServerSentEvent:
    return ServerSentEvent(data=orjson.dumps(document).decode(), sep="\n")
