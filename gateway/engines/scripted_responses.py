"""The scripted engine's answers of ``/v1/responses``, in vLLM's shapes. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.engines.scripted_model import Draw, Drawn, decode

Json = dict[str, Any]


def response_of(one: Draw, body: Mapping[str, Any], drawn: Sequence[Drawn] | None) -> Json:
    """Return the response; None for ``drawn``: it has only begun."""
    tokens = [token.token for token in drawn or ()]
    ended = bool(drawn) and drawn[-1].finish_reason == "stop"
    return {
        "id": body["request_id"],
        "object": "response",
        "created_at": 0,
        "model": body["model"],
        "status": "in_progress" if drawn is None else "completed" if ended else "incomplete",
        "incomplete_details": None if ended or drawn is None else {"reason": "max_output_tokens"},
        "instructions": None,
        "output": [] if drawn is None else [_message(body, decode(tokens), "completed" if ended else "incomplete")],
        "parallel_tool_calls": True,
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
        "tool_choice": "auto",
        "tools": [],
        "background": False,
        "max_output_tokens": body["max_output_tokens"],
        "service_tier": "auto",
        "truncation": "disabled",
        "usage": None
        if drawn is None
        else {
            "input_tokens": len(one.prompt),
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": len(tokens),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(one.prompt) + len(tokens),
        },
    }


def response_opening(one: Draw, body: Mapping[str, Any]) -> Sequence[Json]:
    begun = response_of(one, body, None)
    item: Json = {**_message(body, "", "in_progress"), "content": []}
    return [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        {"type": "response.output_item.added", "output_index": 0, "item": item},
        {"type": "response.content_part.added", **_place(body), "part": _part("")},
    ]


def response_delta(body: Mapping[str, Any], text: str) -> Json:
    return {"type": "response.output_text.delta", **_place(body), "delta": text, "logprobs": []}


def response_closing(one: Draw, body: Mapping[str, Any], drawn: Sequence[Drawn], text: str) -> Sequence[Json]:
    return [
        {"type": "response.output_text.done", **_place(body), "text": text, "logprobs": []},
        {"type": "response.content_part.done", **_place(body), "part": _part(text)},
        {"type": "response.output_item.done", "output_index": 0, "item": _message(body, text, "completed")},
        {"type": "response.completed", "response": response_of(one, body, drawn)},
    ]


def _place(body: Mapping[str, Any]) -> Json:
    return {"item_id": f"msg_{body['request_id']}", "output_index": 0, "content_index": 0}


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}


def _message(body: Mapping[str, Any], text: str, status: str) -> Json:
    return {
        "id": f"msg_{body['request_id']}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [_part(text)],
    }
