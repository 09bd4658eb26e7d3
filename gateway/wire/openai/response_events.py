"""The answers of ``/v1/responses``, in one piece and as events: an engine's own, under our name and the caller's."""

from collections.abc import Iterable, Mapping
from typing import Any

import orjson
from sse_starlette import ServerSentEvent

from gateway.core.counts import RESPONSE_ENDS, ResponseCounts
from gateway.core.errors import GatewayError
from gateway.core.sampling import TokenCounts
from gateway.wire.openai.admission import Admitted
from gateway.wire.openai.errors import error_body

_FIELDS = (
    "background",
    "incomplete_details",
    "instructions",
    "max_output_tokens",
    "metadata",
    "output",
    "parallel_tool_calls",
    "previous_response_id",
    "service_tier",
    "status",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_p",
    "truncation",
    "user",
)


def response_read(
    admitted: Admitted, document: Mapping[str, Any], created: int, usage: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return an engine's response as ours."""
    return {
        **{name: document.get(name) for name in _FIELDS},
        "id": f"resp_{admitted.sample_id}",
        "object": "response",
        "created_at": created,
        "model": admitted.model,
        "system_fingerprint": admitted.target.fingerprint,
        "metadata": admitted.metadata,
        "error": None,
        "usage": usage,
    }


def response_usage(counts: TokenCounts, cost_nanos: int) -> dict[str, Any]:
    """Return the usage as this route spells it, and what it costs in nano-USD."""
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached},
        "output_tokens": counts.sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts.prompt + counts.sampled,
        "cost_nanos": cost_nanos,
    }


class ResponseEvents:
    """Reads an engine's events. The last one waits for the usage."""

    def __init__(self, admitted: Admitted, created: int) -> None:
        self.counts = ResponseCounts()
        self._admitted = admitted
        self._created = created
        self._last: Mapping[str, Any] = {}

    def frames(self, chunk: Mapping[str, Any]) -> Iterable[ServerSentEvent]:
        if chunk["type"] in RESPONSE_ENDS:
            self._last = chunk
        elif "response" in chunk:
            yield _frame({**chunk, "response": response_read(self._admitted, chunk["response"], self._created, None)})
        else:
            yield _frame(chunk)

    def end(self, counts: TokenCounts | None, cost_nanos: int) -> Iterable[ServerSentEvent]:
        document = self._last["response"]
        usage = None if counts is None else response_usage(counts, cost_nanos)
        yield _frame(
            {
                **self._last,
                "type": "response.incomplete" if document["status"] == "incomplete" else self._last["type"],
                "response": response_read(self._admitted, document, self._created, usage),
            }
        )

    def failure(self, error: GatewayError) -> ServerSentEvent:
        return ServerSentEvent(data=orjson.dumps(error_body(error)).decode(), sep="\n")


def _frame(document: Mapping[str, Any]) -> ServerSentEvent:
    return ServerSentEvent(data=orjson.dumps(document).decode(), event=document["type"], sep="\n")
