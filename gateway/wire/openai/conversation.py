"""Turns and tools as the engine's chat template takes them."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from gateway.core.catalog import BaseModel
from gateway.core.errors import Invalid
from gateway.wire.openai.chat_schemas import ChatCreate, Message, ToolCall

# Names by which a template's arguments would reach past the template.
_TEMPLATE_OWN = frozenset(
    {
        "add_generation_prompt",
        "continue_final_message",
        "conversation",
        "documents",
        "messages",
        "padding",
        "response_format",
        "template",
        "tokenize",
        "tokenizer",
        "tokenizer_kwargs",
        "tool_choice",
        "tools",
        "truncation",
    }
)
MAX_TEMPLATE_ARGUMENTS = 32
MAX_ARGUMENT = 1024  # characters


def engine_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the turns for the engine.

    Raises:
        Invalid: a turn lacks what its role needs, or has what it must not have.
    """
    return [_turn(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _turn(message: Message, field: str) -> dict[str, Any]:
    calls = message.tool_calls or []
    if calls and message.role != "assistant":
        raise Invalid("only an assistant's turn has tool_calls", field=f"{field}.tool_calls")
    if message.content is None and not calls:
        raise Invalid(f"{field}.content: a text is required", field=f"{field}.content")
    if (message.role == "tool") != (message.tool_call_id is not None):
        raise Invalid("a tool's turn, and no other, names the tool_call_id it answers", field=f"{field}.tool_call_id")
    turn: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.text,
    }
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if calls:
        turn["tool_calls"] = [_call(call, f"{field}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return turn


def _call(call: ToolCall, field: str) -> dict[str, Any]:
    try:
        arguments: Any = orjson.loads(call.function.arguments)
    except orjson.JSONDecodeError:
        arguments = None
    if not isinstance(arguments, dict):
        where = f"{field}.function.arguments"
        raise Invalid(f"{where} must be the text of a JSON object", field=where)
    return call.model_dump()


def engine_tools(asked: ChatCreate, base: BaseModel) -> dict[str, Any]:
    """Return the engine's ``tools`` and ``tool_choice``; nothing when there are no tools.

    Raises:
        Invalid: the choice does not go with the tools, or the base model has no parser for what ``auto`` would write.
    """
    choice = "auto" if asked.tool_choice is None else asked.tool_choice.type
    function = None if asked.tool_choice is None else asked.tool_choice.function
    if (choice == "function") != (function is not None):
        raise Invalid("tool_choice of type function, and no other, names one", field="tool_choice.function")
    if asked.tools is None:
        if asked.tool_choice is not None and choice not in ("none", "auto"):
            raise Invalid("tool_choice needs tools", field="tool_choice")
        if asked.parallel_tool_calls is not None:
            raise Invalid("parallel_tool_calls needs tools", field="parallel_tool_calls")
        return {}
    names = [tool.function.name for tool in asked.tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise Invalid(f"there are two tools called {name}", field=f"tools[{index}].function.name")
    if function is not None and function.name not in names:
        raise Invalid(f"no tool is called {function.name}", field="tool_choice.function.name")
    if choice == "auto" and base.tool_parser is None:
        raise Invalid(
            f"{base.name} has no tool parser, so it cannot choose by itself; "
            "ask for 'required', one function, or 'none'",
            code="no_tool_parser",
            field="tool_choice",
        )
    return {
        "tools": [tool.model_dump(exclude_none=True) for tool in asked.tools],
        "tool_choice": choice if function is None else {"type": "function", "function": {"name": function.name}},
        "parallel_tool_calls": asked.parallel_tool_calls,
    }


def template_arguments(asked: ChatCreate) -> Mapping[str, Any]:
    """Return what the caller says to the model's own template.

    Raises:
        Invalid: a name that would choose another template, or what is rendered.
    """
    given = asked.chat_template_kwargs or {}
    if len(given) > MAX_TEMPLATE_ARGUMENTS:
        raise Invalid(
            f"chat_template_kwargs has at most {MAX_TEMPLATE_ARGUMENTS} entries", field="chat_template_kwargs"
        )
    for name, value in given.items():
        if not isinstance(value, bool | int | str | None) or (isinstance(value, str) and len(value) > MAX_ARGUMENT):
            field = f"chat_template_kwargs.{name[:64]}"
            raise Invalid(f"{field} must be a boolean, an integer or a short text", field=field)
        if name in _TEMPLATE_OWN or "template" in name or not name.isidentifier():
            raise Invalid(
                f"chat_template_kwargs.{name[:64]} cannot be set: templates come with the model",
                code="chat_template_refused",
                field=f"chat_template_kwargs.{name[:64]}",
            )
    return given
