"""Answers as botocore's models say they look."""

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import orjson
from fastapi import Response

from gateway.wire.sagemaker.models import Document, Operation, Shape


def answered(operation: Operation, answer: Document, *, media_type: str = "application/json") -> Response:
    """Return ``answer`` as the response of ``operation``."""
    body = b"" if operation.answer is None else orjson.dumps(written(operation.answer, answer))
    return Response(body, media_type=media_type)


def written(shape: Shape, value: Any) -> Any:
    """Return ``value`` as JSON: members that are None are left out, moments are seconds since 1970.

    A number that JSON lacks becomes the string ``NaN`` or ``Infinity``, which clients read as that number.

    Raises:
        KeyError: ``value`` has a member that the model does not know.
    """
    match shape.kind:
        case "structure":
            given: Mapping[str, Any] = value
            members = shape.members
            return {name: written(members[name], inner) for name, inner in given.items() if inner is not None}
        case "list":
            item = shape.item
            if item.kind in ("integer", "string"):
                return list(value)
            return [None if inner is None else written(item, inner) for inner in value]
        case "map":
            entries: Mapping[str, Any] = value
            item = shape.item
            return {key: written(item, inner) for key, inner in entries.items()}
        case "double" | "float" if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case "timestamp":
            moment: datetime = value
            return moment.timestamp()
        case _:
            return value
