"""Which fields of a request are honoured: what the tables of the documentation say.

A field of a schema is honoured unless it is marked otherwise here; one that is not there is refused by name. The
refused ones that OpenAI's own clients know are listed with the reason.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import BaseModel
from pydantic.fields import FieldInfo


@dataclass(frozen=True, slots=True)
class Note:
    """What a table says of a field."""

    text: str


def note(text: str) -> Note:
    return Note(text)


NO_EFFECT = Note("accepted, has no effect")

_TEXT_ONLY = "engines read and write text"
_NO_STATE = "no conversation is kept between requests"
_CACHE = "the prefix cache decides by itself"
REFUSED: Mapping[str, str] = {
    "access_programs": "OpenAI's own",
    "audio": _TEXT_ONLY,
    "background": _NO_STATE,
    "background_options": _NO_STATE,
    "chat_template": "templates come with the model",
    "context_management": _NO_STATE,
    "conversation": _NO_STATE,
    "function_call": "use `tool_choice`",
    "functions": "use `tools`",
    "image": _TEXT_ONLY,
    "include": "there is nothing to include",
    "max_tool_calls": "tools run at the client",
    "moderation": "nothing is moderated",
    "prediction": "engines predict nothing from a draft",
    "previous_response_id": _NO_STATE,
    "prompt": "prompts are not stored",
    "prompt_cache_key": _CACHE,
    "prompt_cache_options": _CACHE,
    "prompt_cache_retention": _CACHE,
    "reasoning": "no reasoning parser is configured",
    "reasoning_effort": "no reasoning parser is configured",
    "stream_options": "usage comes with the last event",
    "suffix": "models do not fill in the middle",
    "tool_choice": "tools are for chat completions",
    "tools": "tools are for chat completions",
    "parallel_tool_calls": "tools are for chat completions",
    "top_logprobs": "ask chat completions for log-probabilities",
    "verbosity": "OpenAI's own",
    "web_search_options": "tools run at the client",
}


def table(schema: type[BaseModel], known: Iterable[str]) -> list[str]:
    """Return the rows for ``schema``: its fields, then those that a client may ``know`` and that are refused."""
    rows = [
        f"| `{field.alias or name}` | yes{said and '; '}{said} |"
        if (said := _said(field)) != NO_EFFECT.text
        else f"| `{field.alias or name}` | {said} |"
        for name, field in sorted(schema.model_fields.items())
    ]
    rows += [f"| `{name}` | refused: {REFUSED[name]} |" for name in sorted(known) if name not in schema.model_fields]
    return ["| field | |", "|---|---|", *rows]


def _said(field: FieldInfo) -> str:
    return next((one.text for one in field.metadata if isinstance(one, Note)), "")
