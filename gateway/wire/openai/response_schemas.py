"""Responses as OpenAI spells them: one question, answered once; nothing is kept to go on from."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from gateway.wire.openai.chat_schemas import FunctionName
from gateway.wire.openai.fields import note
from gateway.wire.openai.schemas import MAX_MESSAGES, MAX_SEED, Create, GenerationCreate, Metadata


class TextItem(Create):
    """A part of a turn; of our own answers the empty lists come back as well."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: Annotated[list[Any], Field(max_length=0)] | None = None


def _parts(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


class InputItem(Create):
    """One turn, also an output item of ours that comes back."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextItem], BeforeValidator(_parts, json_schema_input_type=str | list[TextItem])]
    id: str | None = None
    status: Literal["completed", "incomplete"] | None = None
    phase: None = None

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content)


def _items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class TextFormat(Create):
    type: Literal["text", "json_object", "json_schema"]
    name: FunctionName | None = None
    description: Annotated[str, Field(max_length=16384)] | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(Create):
    format: TextFormat | None = None


class ResponseCreate(GenerationCreate):
    """POST /v1/responses."""

    input: Annotated[
        list[InputItem],
        BeforeValidator(_items, json_schema_input_type=str | list[InputItem]),
        Field(min_length=1, max_length=MAX_MESSAGES),
        note("a text, or messages; text only"),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    metadata: Annotated[Metadata | None, note("returned in the answer; not kept")] = None
    seed: Annotated[Annotated[int, Field(ge=0, le=MAX_SEED)] | None, note("vLLM's")] = None
    text: Annotated[TextConfig | None, note("`format` of type `text`, `json_object` or `json_schema`")] = None
    truncation: Annotated[Literal["disabled"] | None, note("`disabled`: what does not fit is refused")] = None
