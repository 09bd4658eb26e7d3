"""Requests against botocore's models.

botocore itself checks neither maxima nor enumerations nor patterns before it sends; here all of them count. Null is the
same as absent, and an unknown member is refused.
"""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, cast

from gateway.core.errors import Invalid
from gateway.wire.sagemaker.models import Shape
from gateway.wire.sagemaker.patterns import matches

_BITS = {"integer": 32, "long": 64}
_SHOWN = 80  # characters of a wrong value that a refusal repeats


def checked(shape: Shape, value: Any, field: str = "") -> Any:
    """Return ``value`` as plain Python values, timestamps as datetimes.

    Raises:
        Invalid: names the field, what it must be, and the limit that it breaks.
    """
    match shape.kind:
        case "structure":
            return _structure(shape, value, field)
        case "document" | "blob":
            return value
        case "list":
            return _list(shape, value, field)
        case "map":
            item = shape.item
            return {
                key: checked(item, inner, f"{field}.{key[:_SHOWN]}") for key, inner in _object(value, field).items()
            }
        case "string":
            return _string(shape, value, field)
        case "boolean":
            if not isinstance(value, bool):
                raise _wrong(field, "must be true or false")
            return value
        case "integer" | "long" as kind:
            return _integer(shape, value, field, _BITS[kind])
        case "float" | "double":
            return _number(shape, value, field)
        case "timestamp":
            return _moment(value, field)
        case kind:
            raise NotImplementedError(kind)


def _structure(shape: Shape, value: Any, field: str) -> Mapping[str, Any]:
    known, where = shape.members, f"{field}." if field else ""
    given = {name: inner for name, inner in _object(value, field).items() if inner is not None}
    for name in given:
        if name not in known:
            raise _wrong(f"{where}{name[:_SHOWN]}", "is not a member of this request")
    for name in shape.required:
        if name not in given:
            raise _wrong(f"{where}{name}", "is required")
    if shape.is_union and len(given) != 1:
        raise _wrong(field, f"must have exactly one of the members {', '.join(known)}")
    return {name: checked(known[name], inner, f"{where}{name}") for name, inner in given.items()}


def _list(shape: Shape, value: Any, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise _wrong(field, "must be a list")
    items = cast("list[Any]", value)
    _check_length(shape, len(items), field, "entries")
    item = shape.item
    if item.kind == "integer" and item.span == (-math.inf, math.inf):
        return _integers(items, field)
    return [checked(item, inner, f"{field}[{index}]") for index, inner in enumerate(items)]


def _integers(items: list[Any], field: str) -> list[int]:
    """Lists of token ids are long: look at them as a whole."""
    bound = 2**31
    if set(map(type, items)) <= {int} and (not items or (-bound <= min(items) and max(items) < bound)):
        return items
    index = next(at for at, item in enumerate(items) if type(item) is not int or not -bound <= item < bound)
    raise _wrong(f"{field}[{index}]", "must be an integer of 32 bits")


def _string(shape: Shape, value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise _wrong(field, "must be a string")
    _check_length(shape, len(value), field, "characters")
    if shape.choices and value not in shape.choices:
        raise _wrong(field, f"must be one of {', '.join(shape.choices)}, got {value[:_SHOWN]!r}")
    if shape.pattern is not None and not matches(shape.pattern, value):
        raise _wrong(field, f"must match the pattern {shape.pattern}, got {value[:_SHOWN]!r}")
    return value


def _integer(shape: Shape, value: Any, field: str, bits: int) -> int:
    bound = 1 << (bits - 1)
    if isinstance(value, bool) or not isinstance(value, int) or not -bound <= value < bound:
        raise _wrong(field, f"must be an integer of {bits} bits")
    _check_range(shape, value, field)
    return value


def _number(shape: Shape, value: Any, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _wrong(field, "must be a finite number")
    _check_range(shape, value, field)
    return float(value)


def _moment(value: Any, field: str) -> datetime:
    try:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError
        return datetime.fromtimestamp(value, UTC)
    except (ValueError, OverflowError, OSError):
        raise _wrong(field, "must be a moment in seconds since 1970") from None


def _object(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(field, "must be an object")
    return cast("dict[str, Any]", value)


def _check_length(shape: Shape, length: int, field: str, unit: str) -> None:
    low, high = shape.span
    if not low <= length <= high:
        raise _wrong(field, f"must have {_spelled(max(0, low), high)} {unit}, got {length}", high)


def _check_range(shape: Shape, value: float, field: str) -> None:
    low, high = shape.span
    if not low <= value <= high:
        raise _wrong(field, f"must be {_spelled(low, high)}, got {value}", high)


def _spelled(low: float, high: float) -> str:
    return f"at least {low}" if high == math.inf else f"{low} to {high}"


def _wrong(field: str, what: str, limit: float = math.inf) -> Invalid:
    details = {} if limit == math.inf else {"limit": limit}
    return Invalid(f"{field or 'the request'} {what}", field=field or None, details=details)
