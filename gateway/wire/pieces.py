"""Large JSON, parsed piece by piece.

A JSON parser holds the interpreter until it is done: a body of 64 MiB parsed at once would stop every other request of
the process for a second, from a thread too. So its outer structure is only skimmed for where the parts lie, and each
part is parsed by a call of its own.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import orjson

PIECE_BYTES = 64 * 1024
LARGE_BYTES = 1024 * 1024
# A batch has its numbers within six. Each level is skimmed once more: more of them would cost more than they save.
_MAX_LEVELS = 8
_Members = dict[str, msgspec.Raw]
_Elements = list[msgspec.Raw]


def loads(raw: bytes) -> Any:
    """Return what ``orjson.loads`` returns. From ``LARGE_BYTES`` on, threads beside this one go on meanwhile.

    A part that has no parts of its own (a long text), or lies deeper than eight levels, is still parsed at once.

    Raises:
        orjson.JSONDecodeError: the same, for the whole of ``raw``.
    """
    if len(raw) < LARGE_BYTES:
        return orjson.loads(raw)
    try:
        return _parse(memoryview(raw), _MAX_LEVELS)
    except (msgspec.DecodeError, orjson.JSONDecodeError):
        return orjson.loads(raw)  # says what is wrong, and where


def _parse(raw: memoryview, levels: int) -> Any:
    if len(raw) <= PIECE_BYTES or not levels:
        return orjson.loads(raw)
    match bytes(raw[:PIECE_BYTES]).lstrip()[:1]:
        case b"{":
            members = msgspec.json.decode(raw, type=_Members)
            return {name: _parse(memoryview(member), levels - 1) for name, member in members.items()}
        case b"[":
            text = bytes(raw).strip()
            if not any(text.find(mark, 1) >= 0 for mark in (b"[", b"{", b'"')):
                return [value for piece in _pieces(text) for value in piece]
            elements = msgspec.json.decode(raw, type=_Elements)
            return [_parse(memoryview(element), levels - 1) for element in elements]
        case _:
            return orjson.loads(raw)


def _pieces(text: bytes) -> Iterator[list[Any]]:
    """Parse a list without lists, objects or strings in it, a piece at a time."""
    begin, end = 1, len(text) - 1
    while begin <= end:
        comma = text.find(b",", begin + PIECE_BYTES, end)
        until = end if comma < 0 else comma
        piece: list[Any] = orjson.loads(b"[%b]" % text[begin:until])
        if not piece:
            raise msgspec.DecodeError("a comma without a value")
        yield piece
        begin = until + 1
