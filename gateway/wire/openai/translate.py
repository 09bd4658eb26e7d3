"""An engine's answers as ours: only the fields of this dialect, the caller's own model name, the version's hash."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from gateway.core.sampling import TokenCounts
from gateway.wire.openai.admission import Admitted

Json = dict[str, Any]


def object_name(admitted: Admitted, *, chunk: bool) -> str:
    if admitted.route == "completions":
        return "text_completion"
    return "chat.completion.chunk" if chunk else "chat.completion"


def envelope(admitted: Admitted, created: int, *, chunk: bool) -> Json:
    """Return the fields that every body and every chunk of one answer share."""
    prefix = "cmpl" if admitted.route == "completions" else "chatcmpl"
    return {
        "id": f"{prefix}-{admitted.sample_id}",
        "object": object_name(admitted, chunk=chunk),
        "created": created,
        "model": admitted.model,
        "system_fingerprint": admitted.target.fingerprint,
    }


def answer(admitted: Admitted, document: Mapping[str, Any], counts: TokenCounts, cost_nanos: int, created: int) -> Json:
    """Return the body of an answer that was not streamed."""
    choices = _kept(admitted, sorted(document["choices"], key=lambda choice: choice["index"]))
    body = {
        **envelope(admitted, created, chunk=False),
        "choices": [_choice(admitted, choice) for choice in choices],
        "usage": usage(counts, cost_nanos),
    }
    if admitted.metadata is not None:
        body["metadata"] = admitted.metadata
    if admitted.route == "chat/completions":
        if admitted.body["prompt_logprobs"] is not None:
            body["prompt_logprobs"] = document.get("prompt_logprobs")
        if admitted.return_token_ids:
            body["prompt_token_ids"] = document.get("prompt_token_ids")
    return body


def _kept(admitted: Admitted, choices: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Of each prompt's samples, keep those with the highest log-probability per token, the best first."""
    if admitted.keep is None or admitted.keep == admitted.samples:
        return choices
    kept: list[Mapping[str, Any]] = []
    for start in range(0, len(choices), admitted.samples):
        ranked = sorted(choices[start : start + admitted.samples], key=_mean_logprob, reverse=True)
        kept += ranked[: admitted.keep]
    return [{**choice, "index": index} for index, choice in enumerate(kept)]


def _mean_logprob(choice: Mapping[str, Any]) -> float:
    logprobs: Sequence[float] = choice["logprobs"]["token_logprobs"]
    return sum(logprobs) / max(1, len(logprobs))


def _choice(admitted: Admitted, choice: Mapping[str, Any]) -> Json:
    rendered: Json = {
        "index": choice["index"],
        "logprobs": choice.get("logprobs") if admitted.show_logprobs else None,
        "finish_reason": choice["finish_reason"],
    }
    if admitted.route == "completions":
        rendered["text"] = choice["text"]
        if admitted.body["prompt_logprobs"] is not None:
            rendered["prompt_logprobs"] = choice.get("prompt_logprobs")
        if admitted.return_token_ids:
            rendered["prompt_token_ids"] = choice.get("prompt_token_ids")
    else:
        rendered["message"] = _message(choice["message"])
        if rendered["logprobs"] is not None and not choice["message"].get("tool_calls"):
            rendered["logprobs"] = {"content": _whole(choice["logprobs"]["content"], choice["message"].get("content"))}
    if admitted.return_token_ids:
        rendered["token_ids"] = choice.get("token_ids")
    return rendered


def _message(message: Mapping[str, Any]) -> Json:
    rendered: Json = {"role": "assistant", "content": message.get("content") or "", "refusal": None}
    if calls := message.get("tool_calls"):
        rendered["content"] = message.get("content") or None
        rendered["tool_calls"] = [_tool_call(call) for call in calls]
    return rendered


def _tool_call(call: Mapping[str, Any]) -> Json:
    function: Mapping[str, Any] = call["function"]
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": function["name"], "arguments": function["arguments"]},
    }


def _whole(entries: Sequence[Mapping[str, Any]], content: str | None) -> Sequence[Mapping[str, Any]]:
    """Return entries whose ``bytes`` together are the text: what is not in it, such as the token that ended the
    sequence or what lies behind a stop string, has none."""
    left = (content or "").encode()
    rendered: list[Mapping[str, Any]] = []
    for entry in entries:
        own = bytes(entry["bytes"]) if entry.get("bytes") else entry["token"].encode()
        shown = own if left.startswith(own) else _common(own, left)
        left = left[len(shown) :]
        rendered.append({**entry, "bytes": list(shown) or None})
    return rendered


def chunk_choice(admitted: Admitted, choice: Mapping[str, Any], *, first: bool) -> Json:
    """Return one choice of a streamed chunk; the ``first`` of a sequence says the role and the prompt's ids."""
    rendered: Json = {
        "index": choice["index"],
        "logprobs": choice.get("logprobs"),
        "finish_reason": choice.get("finish_reason"),
    }
    if admitted.route == "completions":
        rendered["text"] = choice.get("text") or ""
    else:
        given: Mapping[str, Any] = choice.get("delta") or {}
        content = given.get("content")
        delta: Json = {"role": "assistant", "content": content or ""} if first else {}
        if not first and content is not None:
            delta["content"] = content
        if calls := given.get("tool_calls"):
            delta["tool_calls"] = calls
        rendered["delta"] = delta
        ended = choice.get("finish_reason") == "stop" and choice.get("stop_reason") is None
        if ended and rendered["logprobs"] is not None:
            rendered["logprobs"] = {"content": _ended(choice["logprobs"]["content"])}
    if admitted.return_token_ids:
        rendered["token_ids"] = choice.get("token_ids") or []
        if first and choice.get("prompt_token_ids") is not None:
            rendered["prompt_token_ids"] = choice["prompt_token_ids"]
    return rendered


def _common(one: bytes, other: bytes) -> bytes:
    """Return what both begin with."""
    return bytes(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _ended(entries: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the last entries of a sequence that the model ended: the token that ended it is no text."""
    return [*entries[:-1], *({**entry, "bytes": None} for entry in entries[-1:])]


def usage(counts: TokenCounts, cost_nanos: int) -> Json:
    """Return OpenAI's usage, and what it costs in nano-USD."""
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.sampled,
        "total_tokens": counts.prompt + counts.sampled,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
        "cost_nanos": cost_nanos,
    }
