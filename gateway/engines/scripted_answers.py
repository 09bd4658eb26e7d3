"""The scripted engine's answers in vLLM's shapes. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.core.scripted import scripted_logprob
from gateway.engines.scripted_model import Draw, Drawn, decode, encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What requests are checked against."""

    max_model_len: int
    vocab_size: int


class Refused(ValueError):
    """The request is wrong; answered with 400."""


def prompts_of(prompt: Any) -> list[list[int]]:
    """Read the ``prompt`` of a completion body: a text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [encode(prompt)]
    if prompt and isinstance(prompt[0], int):
        return [prompt]
    return [encode(part) if isinstance(part, str) else part for part in prompt]


def chat_prompt(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The scripted chat template."""
    turns = [f"<{message['role']}>{message.get('content') or ''}\n" for message in messages]
    return encode("".join(turns) + "<assistant>")


def draw_of(body: Mapping[str, Any], prompt: Sequence[int], *, fingerprint: str, sample: int, limits: Limits) -> Draw:
    """Read and check sample number ``sample`` of one prompt, as vLLM does.

    Raises:
        Refused: the message says why.
    """
    room = limits.max_model_len - len(prompt)
    limit = body.get("max_tokens")
    max_tokens: int = room if limit is None else limit
    if not prompt or not all(0 <= token < limits.vocab_size for token in prompt):
        raise Refused("token id out of vocabulary or empty prompt")
    if max_tokens == 0 and body.get("echo"):
        max_tokens = 1  # vLLM, too, generates a token that nobody sees
    if not 1 <= max_tokens <= room:
        raise Refused(f"This model's maximum context length is {limits.max_model_len} tokens")
    stop: Any = body.get("stop") or ()
    return Draw(
        fingerprint=fingerprint,
        prompt=tuple(prompt),
        max_tokens=max_tokens,
        seed=(body.get("seed") or 0) + sample,
        greedy=body.get("temperature") == 0,
        stop_token_ids=frozenset(body.get("stop_token_ids") or ()),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        ignore_end=bool(body.get("ignore_eos")),
    )


def choice_of(index: int, one: Draw, drawn: Sequence[Drawn], body: Mapping[str, Any], *, chat: bool) -> dict[str, Any]:
    """Return one choice in the shape of its route."""
    tokens = [token.token for token in drawn]
    choice: dict[str, Any] = {
        "index": index,
        "finish_reason": drawn[-1].finish_reason if drawn else None,
        "stop_reason": drawn[-1].stop_reason if drawn else None,
        "logprobs": None,
    }
    if body.get("return_token_ids"):
        choice |= {"token_ids": tokens, "prompt_token_ids": list(one.prompt)}
    if chat:
        choice["message"] = {"role": "assistant", "content": decode(tokens)}
        if body.get("logprobs"):
            entries: list[dict[str, Any]] = [
                {
                    "token": decode([t.token]),
                    "logprob": t.logprob,
                    "bytes": list(decode([t.token]).encode()),
                    "top_logprobs": [],
                }
                for t in drawn
            ]
            choice["logprobs"] = {"content": entries}
        return choice
    echoed = list(one.prompt) if body.get("echo") else []
    shown = echoed if echoed and body["max_tokens"] == 0 else [*echoed, *tokens]
    choice["text"] = decode(shown)
    if body.get("logprobs") is not None:
        names = [f"token_id:{t}" if body.get("return_tokens_as_token_ids") else decode([t]) for t in shown]
        before = [None, *echoed[:-1]] if echoed else []
        previous = [*before, *[one.prompt[-1], *tokens][: len(shown) - len(before)]]
        tops = _tops(one, previous, shown, names, body["logprobs"], body.get("logprob_token_ids") or ())
        choice["logprobs"] = {
            "tokens": names,
            "token_logprobs": [None if top is None else top[name] for top, name in zip(tops, names, strict=True)],
            "top_logprobs": tops,
            "text_offset": list(range(len(shown))),
        }
    if body.get("prompt_logprobs") is not None:
        positions = range(1, len(one.prompt))
        choice["prompt_logprobs"] = [None, *(_alternatives(one, at, body["prompt_logprobs"]) for at in positions)]
    return choice


def as_tool_call(choice: dict[str, Any], body: Mapping[str, Any], index: int, *, first: bool, last: bool) -> None:
    """Make the text of a chat's choice, or of a part of it, the argument ``text`` of the tool that must be called."""
    chosen: Any = body.get("tool_choice")
    if chosen in (None, "none", "auto"):
        return
    function: dict[str, Any] = body["tools"][0]["function"] if chosen == "required" else chosen["function"]
    name = function["name"]
    message: dict[str, Any] = choice["message"]
    function = {"arguments": '{"text": "' * first + message["content"] + '"}' * last}
    call: dict[str, Any] = {"index": 0, "function": function}
    if first:
        call |= {"id": f"call-{index}", "type": "function"}
        function["name"] = name
    message |= {"content": "" if first else None, "tool_calls": [call]}
    if chosen == "required" and choice["finish_reason"] == "stop":
        choice["finish_reason"] = "tool_calls"


def _tops(
    one: Draw,
    before: Sequence[int | None],
    tokens: Sequence[int],
    names: Sequence[str],
    count: int,
    asked: Sequence[int],
) -> list[dict[str, float] | None]:
    """For each token but a prompt's first, itself, the ``count`` most likely of its neighbours in id, and the ids
    ``asked`` for. ``before`` is each token's predecessor."""
    tops: list[dict[str, float] | None] = []
    for previous, token, name in zip(before, tokens, names, strict=True):
        if previous is None:
            tops.append(None)
            continue
        scores = {name: scripted_logprob(one.fingerprint, previous, token)}
        for other in [*(token ^ step for step in range(1, count)), *asked]:
            scores[f"token_id:{other}"] = scripted_logprob(one.fingerprint, previous, other)
        tops.append(scores)
    return tops


def _alternatives(one: Draw, at: int, count: int) -> dict[str, dict[str, Any]]:
    """The token at position ``at`` and the ``count`` most likely of its neighbours in id, ranked."""
    previous, token = one.prompt[at - 1], one.prompt[at]
    near = {token ^ step for step in range(count + 1)}
    scored = sorted(near, key=lambda other: -scripted_logprob(one.fingerprint, previous, other))
    return {
        str(other): {"logprob": scripted_logprob(one.fingerprint, previous, other), "rank": rank}
        for rank, other in enumerate(scored, start=1)
        if rank <= count or other == token
    }


def usage(prompt_tokens: int, sampled: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": prompt_tokens + sampled,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
