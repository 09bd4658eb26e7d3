"""What an engine sent, as an object."""

from typing import Any, cast

import orjson

from gateway.core.errors import Internal


def document_of(content: bytes) -> dict[str, Any]:
    """Return the JSON object. Loads and unloads answer in plain text: that is an empty document."""
    try:
        document: Any = orjson.loads(content)
    except orjson.JSONDecodeError:
        return {}
    if not isinstance(document, dict):
        raise Internal("the engine answered something else than an object", code="engine_answer_mismatch")
    return cast("dict[str, Any]", document)
