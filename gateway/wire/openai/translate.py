"""An engine's answers as ours: only the fields of this dialect, the caller's own model name, the version's hash."""

from collections.abc import Mapping
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
    choices = sorted(document["choices"], key=lambda choice: choice["index"])
    body = {
        **envelope(admitted, created, chunk=False),
        "choices": [_choice(admitted, choice) for choice in choices],
        "usage": usage(counts, cost_nanos),
    }
    if admitted.route == "chat/completions":
        if admitted.body["prompt_logprobs"] is not None:
            body["prompt_logprobs"] = document.get("prompt_logprobs")
        if admitted.return_token_ids:
            body["prompt_token_ids"] = document.get("prompt_token_ids")
    return body


def _choice(admitted: Admitted, choice: Mapping[str, Any]) -> Json:
    rendered: Json = {
        "index": choice["index"],
        "logprobs": choice.get("logprobs"),
        "finish_reason": choice["finish_reason"],
    }
    if admitted.route == "completions":
        rendered["text"] = choice["text"]
        if admitted.body["prompt_logprobs"] is not None:
            rendered["prompt_logprobs"] = choice.get("prompt_logprobs")
        if admitted.return_token_ids:
            rendered["prompt_token_ids"] = choice.get("prompt_token_ids")
    else:
        message = choice["message"]
        rendered["message"] = {"role": "assistant", "content": message.get("content") or "", "refusal": None}
    if admitted.return_token_ids:
        rendered["token_ids"] = choice.get("token_ids")
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
        rendered["delta"] = delta
    if admitted.return_token_ids:
        rendered["token_ids"] = choice.get("token_ids") or []
        if first and choice.get("prompt_token_ids") is not None:
            rendered["prompt_token_ids"] = choice["prompt_token_ids"]
    return rendered


def usage(counts: TokenCounts, cost_nanos: int) -> Json:
    """Return OpenAI's usage, and what it costs in nano-USD."""
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.sampled,
        "total_tokens": counts.prompt + counts.sampled,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
        "cost_nanos": cost_nanos,
    }
