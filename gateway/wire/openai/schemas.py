"""Requests as OpenAI spells them: the fields here are honoured, every other one is refused by name.

Beside OpenAI's own: ``top_k``, ``min_p``, ``prompt_logprobs`` and ``return_token_ids``, as vLLM spells them. ``user``
is accepted and has no effect. Null means the default.
"""

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema

from gateway.core.sampling import MAX_STOP_LENGTH, MAX_STOPS, MAX_TOPK_LOGPROBS

MAX_N = 128
MAX_PROMPTS = 64
MAX_SEQUENCES = 256  # prompts times n
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_MESSAGES = 4096
MAX_SEED = 2**63 - 1 - MAX_N


class Create(BaseModel):
    """Base of every request body."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(Create):
    include_usage: bool | None = None


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


class SamplingCreate(Create):
    """What completions and chat completions share."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stop: Stops | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Biases = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOPK_LOGPROBS)] | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None


class TextPart(Create):
    type: Literal["text"]
    text: str


def _parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Message(Create):
    """One turn. What a client sends back of our own answers (null ``refusal`` and the like) is accepted as null."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], BeforeValidator(_parts, json_schema_input_type=str | list[TextPart])]
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content)


class ChatCreate(SamplingCreate):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


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

    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
