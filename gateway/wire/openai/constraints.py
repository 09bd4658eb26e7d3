"""What constrains an answer: tried out before an engine sees it, then said in the engine's words."""

from collections.abc import Mapping
from typing import Any, cast

import orjson

from gateway.core.errors import Invalid
from gateway.core.ports import Constraint, Grammars
from gateway.wire.openai.chat_schemas import ChatCreate
from gateway.wire.openai.response_schemas import ResponseCreate
from gateway.wire.openai.schemas import SamplingCreate, StructuredOutputs

MAX_SCHEMA_BYTES = 65536
MAX_SCHEMA_DEPTH = 64


async def engine_constraints(grammars: Grammars, asked: SamplingCreate, tools: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's ``response_format`` and ``structured_outputs``, of which at most one is there.

    Raises:
        Invalid: ``invalid_grammar``; two constraints at once.
    """
    outputs = asked.structured_outputs
    said: dict[str, Any] = {} if outputs is None else {"structured_outputs": await _structured(grammars, outputs)}
    if not isinstance(asked, ChatCreate):
        return said
    for index, tool in enumerate(asked.tools or ()):
        if tool.function.parameters is not None:
            await _schema(grammars, tool.function.parameters, f"tools[{index}].function.parameters")
    called = tools.get("tool_choice", "none") not in ("none", "auto")
    answer_format = asked.response_format
    if outputs is not None and (called or answer_format is not None):
        raise Invalid(
            "structured_outputs does not go with response_format or a tool that must be called",
            field="structured_outputs",
        )
    if answer_format is None or answer_format.type == "text":
        return said
    if called:
        raise Invalid("response_format does not go with a tool that must be called", field="response_format")
    schema = answer_format.json_schema
    if (answer_format.type == "json_schema") != (schema is not None):
        raise Invalid("type json_schema, and no other, has a json_schema", field="response_format.json_schema")
    if schema is None:
        return {"response_format": {"type": "json_object"}}
    await _schema(grammars, schema.json_schema, "response_format.json_schema.schema")
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": schema.name, "schema": schema.json_schema},
        }
    }


async def engine_text_format(grammars: Grammars, asked: ResponseCreate) -> dict[str, Any] | None:
    """Return the engine's ``text`` of a response.

    Raises:
        Invalid: ``invalid_grammar``; a schema without its type, or the other way round.
    """
    wanted = None if asked.text is None else asked.text.format
    if wanted is None or wanted.type == "text":
        return None
    if (wanted.type == "json_schema") != (wanted.json_schema is not None):
        raise Invalid("type json_schema, and no other, has a schema", field="text.format.schema")
    if wanted.json_schema is None:
        return {"format": {"type": "json_object"}}
    await _schema(grammars, wanted.json_schema, "text.format.schema")
    name = wanted.name or "answer"
    return {"format": {"type": "json_schema", "name": name, "schema": wanted.json_schema}}


async def _structured(grammars: Grammars, outputs: StructuredOutputs) -> dict[str, Any]:
    given = outputs.model_dump(exclude_none=True, by_alias=True)
    if len(given) != 1:
        raise Invalid("give exactly one of json, regex, choice and grammar", field="structured_outputs")
    if outputs.json_schema is not None:
        await _schema(grammars, outputs.json_schema, "structured_outputs.json")
    if outputs.regex is not None:
        await grammars.check(Constraint.REGEX, outputs.regex, field="structured_outputs.regex")
    if outputs.grammar is not None:
        await grammars.check(Constraint.GRAMMAR, outputs.grammar, field="structured_outputs.grammar")
    return given


async def _schema(grammars: Grammars, schema: Mapping[str, Any], field: str) -> None:
    if _depth(schema) > MAX_SCHEMA_DEPTH:
        raise Invalid(f"{field} is nested deeper than {MAX_SCHEMA_DEPTH}", code="invalid_grammar", field=field)
    text = orjson.dumps(schema)
    if len(text) > MAX_SCHEMA_BYTES:
        raise Invalid(
            f"{field} has {len(text)} bytes, at most {MAX_SCHEMA_BYTES} are allowed",
            code="invalid_grammar",
            field=field,
            details={"limit": MAX_SCHEMA_BYTES, "got": len(text)},
        )
    await grammars.check(Constraint.JSON, text.decode(), field=field)


def _depth(value: Any) -> int:
    """Return how deep containers are nested, or a little more than MAX_SCHEMA_DEPTH."""
    level: list[Any] = [value]
    depth = 0
    while level and depth <= MAX_SCHEMA_DEPTH:
        depth += 1
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner += cast("dict[str, Any]", one).values()
            elif isinstance(one, list):
                inner += cast("list[Any]", one)
        level = [one for one in inner if isinstance(one, dict | list)]
    return depth
