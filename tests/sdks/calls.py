"""The table of calls that OpenAI's Python and Node clients make alike. ``MODEL`` stands for who is to answer."""

from dataclasses import dataclass
from typing import Any

MODEL = "MODEL"


@dataclass(frozen=True, slots=True)
class Call:
    """``route`` is the engine's own, where its answer decides what ours must be."""

    name: str
    method: str
    body: Any
    route: str | None = None


TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say a number."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather",
        "parameters": {
            "type": "object",
            "properties": {"day": {"type": "integer", "minimum": 1, "maximum": 7}},
            "required": ["day"],
            "additionalProperties": False,
        },
    },
}
USED = [
    *TURNS,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"day": 3}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


def _chat(name: str, **body: Any) -> Call:
    whole = {"model": MODEL, "messages": TURNS, "max_tokens": 8, "temperature": 1, "seed": 7, **body}
    return Call(name, "chat.completions.create", whole, "chat/completions")


def _completion(name: str, **body: Any) -> Call:
    whole = {"model": MODEL, "prompt": "One two", "max_tokens": 8, "temperature": 1, "seed": 7, **body}
    return Call(name, "completions.create", whole, "completions")


def _streamed(call: Call) -> Call:
    body = {**call.body, "stream": True, "stream_options": {"include_usage": True}}
    return Call(f"{call.name}, streamed", call.method, body, call.route)


CHATS = [
    _chat("chat, greedy", temperature=0),
    _chat("chat, two choices with alternatives", n=2, logprobs=True, top_logprobs=3),
    _chat("chat, alternatives that cannot be drawn", top_k=1, logprobs=True, top_logprobs=3, max_tokens=2),
    _chat("chat, stops and penalties", stop=["e", "q"], presence_penalty=1.5, frequency_penalty=0.5, max_tokens=16),
    _chat("chat, biased", logit_bias={"100": 100}, max_tokens=3, top_p=0.9),
    _chat("chat, a form", max_tokens=40, response_format={"type": "json_object"}),
    _chat(
        "chat, a schema",
        max_tokens=40,
        response_format={"type": "json_schema", "json_schema": {"name": "ok", "schema": SCHEMA}},
    ),
    _chat("chat, a tool that must be called", max_tokens=60, tools=[WEATHER], tool_choice="required"),
    _chat(
        "chat, this tool",
        max_tokens=60,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "weather"}},
    ),
    _chat("chat, a tool if it likes", tools=[WEATHER]),
    _chat("chat, after a tool", messages=USED, tools=[WEATHER], tool_choice="none"),
    _chat("chat, vLLM's own fields", top_k=5, min_p=0.05, return_token_ids=True, repetition_penalty=1.1, min_tokens=3),
    _chat("chat, an argument of the template", chat_template_kwargs={"enable_thinking": False}, max_tokens=4),
    _chat("chat, a choice of texts", structured_outputs={"choice": ["left", "right"]}),
]
COMPLETIONS = [
    _completion("completion, text"),
    _completion("completion, token ids", prompt=[504, 734, 28]),
    _completion("completion, texts", prompt=["One two", "Red green"], n=2),
    _completion("completion, lists of ids", prompt=[[504, 734], [28, 29, 30]], logprobs=2),
    _completion("completion, stop and biases", stop=["a"], logit_bias={"300": 5}, top_p=0.8),
    _completion("completion, a pattern", structured_outputs={"regex": "[0-9]{4}"}),
    _completion("completion, stop ids", ignore_eos=True, stop_token_ids=[5, 6]),
    _completion("completion, echoed", echo=True, logprobs=1, max_tokens=3),
]
WHOLE_ONLY = [
    _chat("chat, scored prompt", prompt_logprobs=1, max_tokens=1),
    _completion("completion, scored prompt", prompt_logprobs=0, max_tokens=1),
    _completion("completion, only echoed", echo=True, logprobs=1, max_tokens=0),
]
OTHERS = [
    Call(
        "a response", "responses.create", {"model": MODEL, "input": "Say a number.", "max_output_tokens": 8, "seed": 7}
    ),
    Call(
        "a response, streamed",
        "responses.create",
        {
            "model": MODEL,
            "input": TURNS[1:],
            "instructions": "Be brief.",
            "max_output_tokens": 8,
            "seed": 7,
            "stream": True,
        },
    ),
    Call(
        "a response of a form",
        "responses.create",
        {
            "model": MODEL,
            "input": "Is it?",
            "max_output_tokens": 30,
            "seed": 7,
            "text": {"format": {"type": "json_schema", "name": "ok", "schema": SCHEMA}},
        },
    ),
    Call(
        "the best of three",
        "completions.create",
        {"model": MODEL, "prompt": "a", "best_of": 3, "max_tokens": 4, "seed": 1},
    ),
    Call("models", "models.list", None),
    Call("a model", "models.retrieve", MODEL),
    Call("no model", "models.retrieve", "nothing"),
    _chat("chat with nothing", model="nothing"),
    _chat("chat, an unknown field", best=1),
    _chat("chat, a template of its own", chat_template="{{ messages }}"),
    _chat("chat, a schema that is none", structured_outputs={"json": {"type": "objekt"}}),
    _chat("chat, too long", max_tokens=5000),
    _chat("chat, too hot, streamed", temperature=3, stream=True),
]
CALLS = [
    *CHATS,
    *COMPLETIONS,
    *WHOLE_ONLY,
    *map(_streamed, [*CHATS, *COMPLETIONS]),
    *OTHERS,
]
