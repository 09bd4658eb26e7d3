"""Requests as OpenAI spells them: the fields here are honoured, every other one is refused by name (``fields``).

Beside OpenAI's own there are some of vLLM's, in its spelling. Null means the default.
"""

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema

from gateway.core.sampling import MAX_STOP_LENGTH, MAX_STOPS, MAX_TOPK_LOGPROBS
from gateway.wire.openai.fields import NO_EFFECT, note

MAX_N = 128
MAX_PROMPTS = 64
MAX_SEQUENCES = 256  # prompts times n
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_MESSAGES = 4096
MAX_SEED = 2**63 - 1 - MAX_N
MAX_METADATA = 16  # entries; their names and texts as in OpenAI's API
MAX_SCHEMA_DEPTH = 64


class Create(BaseModel):
    """Base of every request body."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(Create):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _biases(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    entries = cast("dict[str, Any]", value)
    if len(entries) > MAX_BIASES:
        raise ValueError(f"at most {MAX_BIASES} entries")
    for token, bias in entries.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= 10):
            raise ValueError(f"{token[:20]!r} is not a token id")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError(f"the bias of {token} must be a number from -100 to 100")
    return {int(token): float(bias) for token, bias in entries.items()}


Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]],
    BeforeValidator(_one_or_many, json_schema_input_type=str | list[str]),
    Field(max_length=MAX_STOPS),
]
Biases = Annotated[
    dict[int, float] | None,
    BeforeValidator(_biases),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]


Metadata = Annotated[
    dict[
        Annotated[str, Field(min_length=1, max_length=64)],
        Annotated[str, Field(max_length=512)],
    ],
    Field(max_length=MAX_METADATA),
]


class StructuredOutputs(Create):
    """What the text must be: exactly one of these."""

    json_schema: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    regex: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    choice: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=1024)]],
            Field(min_length=1, max_length=1024),
        ]
        | None
    ) = None
    grammar: Annotated[str, Field(min_length=1, max_length=65536)] | None = None


class GenerationCreate(Create):
    """What every route that generates shares."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Annotated[int, Field(ge=-1)] | None, note("vLLM's; -1 keeps all tokens")] = None
    min_p: Annotated[Annotated[float, Field(ge=0, le=1)] | None, note("vLLM's")] = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Biases = None
    stream: bool | None = None
    user: Annotated[Annotated[str, Field(max_length=512)] | None, NO_EFFECT] = None
    safety_identifier: Annotated[Annotated[str, Field(max_length=512)] | None, NO_EFFECT] = None
    store: Annotated[Literal[False] | None, note("`false` only: nothing is kept to be read again")] = None
    service_tier: Annotated[Literal["auto", "default"] | None, note("`auto` and `default`; there is one tier")] = None


class SamplingCreate(GenerationCreate):
    """What completions and chat completions share."""

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stop: Stops | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    stream_options: Annotated[StreamOptions | None, note("`include_usage`; `include_obfuscation` only `false`")] = None
    metadata: Annotated[Metadata | None, note("returned in an answer of one piece; not kept")] = None
    repetition_penalty: Annotated[Annotated[float, Field(gt=0, le=2)] | None, note("vLLM's")] = None
    min_tokens: Annotated[Annotated[int, Field(ge=0)] | None, note("vLLM's")] = None
    ignore_eos: Annotated[bool | None, note("vLLM's")] = None
    stop_token_ids: Annotated[Annotated[list[int], Field(max_length=MAX_STOPS)] | None, note("vLLM's")] = None
    prompt_logprobs: Annotated[
        Annotated[int, Field(ge=0, le=MAX_TOPK_LOGPROBS)] | None, note("vLLM's; not in streams")
    ] = None
    return_token_ids: Annotated[bool | None, note("vLLM's")] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, note("vLLM's; exactly one of `json`, `regex`, `choice`, `grammar`")
    ] = None


Prompt = str | list[int]


def _prompts(value: Any) -> list[Prompt]:
    """Read a text, token ids, or a list of either."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a text, token ids, or a list of these, and not empty")
    items = cast("list[Any]", value)
    if all(type(item) is int for item in items):
        return [cast("list[int]", items)]
    if len(items) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts, got {len(items)}")
    for index, item in enumerate(items):
        ids = isinstance(item, list) and all(type(token) is int for token in cast("list[Any]", item))
        if not (isinstance(item, str) or ids):
            raise ValueError(f"entry {index} is neither a text nor a list of token ids")
        if isinstance(item, str) != isinstance(items[0], str):
            raise ValueError(f"entry {index} is of another kind than entry 0")
    return cast("list[Prompt]", items)


Prompts = Annotated[
    list[Prompt],
    PlainValidator(_prompts),
    WithJsonSchema({"description": "A text, token ids, or a list of either"}),
]


class CompletionCreate(SamplingCreate):
    """POST /v1/completions."""

    prompt: Annotated[Prompts, note("text, token ids, or a list of either")]
    echo: bool | None = None
    best_of: Annotated[Annotated[int, Field(ge=1, le=MAX_N)] | None, note("not in streams; all of them are billed")] = (
        None
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
