"""Chat completions as OpenAI spells them: turns, tools, the form of the answer."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from gateway.wire.openai.fields import note
from gateway.wire.openai.schemas import MAX_LOGPROBS, MAX_MESSAGES, Create, SamplingCreate
from gateway.wire.texts import matching

MAX_TOOLS = 128
MAX_NAME = 64

FunctionName = Annotated[str, *matching(r"[a-zA-Z0-9_-]{1,64}", "1 to 64 of a-z, A-Z, 0-9, '_' and '-'")]


class TextPart(Create):
    type: Literal["text"]
    text: str


def _parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class FunctionCall(Create):
    name: FunctionName
    arguments: str


class ToolCall(Create):
    id: Annotated[str, Field(min_length=1, max_length=128)]
    type: Literal["function"]
    function: FunctionCall


class Message(Create):
    """One turn. What a client sends back of our own answers (null ``refusal`` and the like) is accepted as null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        list[TextPart] | None, BeforeValidator(_parts, json_schema_input_type=str | list[TextPart] | None)
    ] = None
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @property
    def text(self) -> str | None:
        return None if self.content is None else "\n".join(part.text for part in self.content)


class Function(Create):
    name: FunctionName
    description: Annotated[str, Field(max_length=16384)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Create):
    type: Literal["function"]
    function: Function


class NamedFunction(Create):
    name: FunctionName


class ToolChoice(Create):
    """``type`` is ``none``, ``auto``, ``required``, or ``function`` with the one that must be called."""

    type: Literal["none", "auto", "required", "function"]
    function: NamedFunction | None = None


def _choice(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


class JsonSchema(Create):
    name: FunctionName
    description: Annotated[str, Field(max_length=16384)] | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Create):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatCreate(SamplingCreate):
    """POST /v1/chat/completions."""

    messages: Annotated[
        list[Message],
        Field(min_length=1, max_length=MAX_MESSAGES),
        note("roles `system`, `developer`, `user`, `assistant`, `tool`; text only"),
    ]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[
        Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS)] | None, note("of type `function`")
    ] = None
    tool_choice: Annotated[
        ToolChoice | None,
        BeforeValidator(_choice, json_schema_input_type=str | ToolChoice | None),
        note("`auto` needs a `tool_parser` in the catalogue"),
    ] = None
    parallel_tool_calls: bool | None = None
    response_format: Annotated[ResponseFormat | None, note("`text`, `json_object`, `json_schema`")] = None
    modalities: Annotated[
        Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None, note("`text` only")
    ] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, note("vLLM's; values for the model's own template")] = None
