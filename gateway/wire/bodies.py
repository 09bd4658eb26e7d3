"""Request bodies: bounded, decompressed, and read as the strictest JSON.

Refused with a 4xx before anything else looks at a body: more than the allowed bytes (before or after decompression),
an unknown encoding, NaN and Infinity (but where a dialect writes them), numbers beyond a double (``1e999``), invalid
UTF-8, lone surrogates, NUL in a string, nesting deeper than 200.
"""

import asyncio
import hashlib
import io
import json
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, cast

import orjson
import zstandard
from starlette.requests import Request
from starlette.types import Receive, Scope

from gateway.core.errors import Invalid
from gateway.wire import pieces

_JSON = "application/json"
_MAX_EXPLAINED = 1024 * 1024  # a body that is not JSON and longer than that is only told the byte
_OUTLINED = 4096  # bytes of the beginning and of the end of a body that is too large
_MAX_DEPTH = 200  # what a dialect passes on, it writes again: orjson writes 254 levels
_MAX_ZSTD_WINDOW = 2**27  # what an encoder may ask us to hold while decoding


class BodyTooLarge(Invalid):
    """The body is larger than the gateway accepts."""

    default_code = "body_too_large"

    def __init__(self, limit: int, *, begins: bytes = b"") -> None:
        super().__init__(f"the request body is larger than {limit} bytes", details={"limit": limit})
        self.begins = begins  # where it was compressed: its first bytes


class StrictRequest(Request):
    """A request whose body is read once, by ``load``, under the rules of this module.

    A media type that a route takes beside JSON is left to the route: ``body()`` gives its bytes, decompressed. Without
    ``media_types`` every body is. A body that is too large is not kept, but up to ``max_drained`` bytes are
    read, so that its sender hears the answer; ``excess`` says what it was.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        *,
        max_bytes: int,
        media_types: Collection[str] | None,
        max_drained: int | None = None,
    ) -> None:
        super().__init__(scope, receive)
        self._max_bytes = max_bytes
        self._max_drained = 2 * max_bytes if max_drained is None else max_drained
        self._media_types = media_types
        self._received = b""
        self.excess: Excess | None = None

    def digest(self) -> str:
        """Return the SHA-256, in hex, of the body's bytes as they came, which a signature is over."""
        return hashlib.sha256(self._received).hexdigest() if self.excess is None else self.excess.digest

    async def load(self) -> None:
        """Read, decompress and parse the body; ``body()`` and ``json()`` answer from then on.

        Raises:
            BodyTooLarge, Invalid: see the module.
        """
        self._received = await self._read()
        encoding = self.headers.get("content-encoding")
        if encoding is None and len(self._received) < pieces.LARGE_BYTES:
            self._take(self._received)
        else:
            await asyncio.to_thread(self._decode, encoding)

    def _decode(self, encoding: str | None) -> None:
        try:
            decoded = decompress(self._received, encoding, limit=self._max_bytes)
        except BodyTooLarge as error:
            self.excess = Excess(self._received, head=error.begins, tail=b"")
            raise
        self._take(decoded)

    def _take(self, raw: bytes) -> None:
        self._body = raw
        if raw and self._media_types is not None:
            content_type = self.headers.get("content-type", "").partition(";")[0].strip().lower()
            if content_type not in self._media_types:
                known = " or ".join(sorted(self._media_types))
                raise Invalid(f"Content-Type must be {known}", field="Content-Type")
            if content_type == _JSON:
                self._json = parse_json(raw)

    async def _read(self) -> bytes:
        announced = self.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_drained:
            raise BodyTooLarge(self._max_bytes)
        chunks: list[bytes] = []
        size, excess = 0, None
        async for chunk in self.stream():
            size += len(chunk)
            if size <= self._max_bytes:
                chunks.append(chunk)
                continue
            if size > self._max_drained:
                raise BodyTooLarge(self._max_bytes)
            if excess is None:
                begun = b"".join(chunks)
                excess = Excess(begun, head=begun, tail=begun)
                chunks.clear()
            excess.add(chunk)
        if excess is not None:
            self.excess = excess
            raise BodyTooLarge(self._max_bytes)
        return b"".join(chunks)


class Excess:
    """What is kept of a body that is too large: the SHA-256 of all of it as it came, how it begins and how it ends.

    ``head`` and ``tail`` are decompressed; of a compressed body nobody knows the end.
    """

    def __init__(self, begun: bytes, *, head: bytes, tail: bytes) -> None:
        self._hash = hashlib.sha256(begun)
        self.head, self.tail = head[:_OUTLINED], tail[-_OUTLINED:]

    def add(self, chunk: bytes) -> None:
        self._hash.update(chunk)
        self.head += chunk[: _OUTLINED - len(self.head)]
        self.tail = (self.tail + chunk)[-_OUTLINED:]

    @property
    def digest(self) -> str:
        """In hex."""
        return self._hash.hexdigest()

    @property
    def outline(self) -> bytes:
        """Its first and its last few thousand bytes."""
        return self.head + self.tail


def decompress(raw: bytes, encoding: str | None, *, limit: int) -> bytes:
    """Undo ``Content-Encoding``; never hold more than ``limit`` decoded bytes.

    Raises:
        BodyTooLarge: the decoded body is larger than ``limit``.
        Invalid: an encoding other than gzip and zstd, or damaged content.
    """
    match (encoding or "identity").strip().lower():
        case "identity":
            return raw
        case "gzip" | "x-gzip":
            decoded = _gunzip(raw, limit)
        case "zstd":
            decoded = _unzstd(raw, limit)
        case _:
            raise Invalid(
                "Content-Encoding must be gzip or zstd", code="unsupported_encoding", field="Content-Encoding"
            )
    if len(decoded) > limit:
        raise BodyTooLarge(limit, begins=decoded[:_OUTLINED])
    return decoded


def _gunzip(raw: bytes, limit: int) -> bytes:
    decoder = zlib.decompressobj(31)
    try:
        decoded = decoder.decompress(raw, limit + 1)
    except zlib.error as error:
        raise Invalid(f"the body is not valid gzip: {error}", field="Content-Encoding") from None
    if len(decoded) <= limit and (not decoder.eof or decoder.unused_data):
        raise Invalid("the body is not one complete gzip member", field="Content-Encoding")
    return decoded


def _unzstd(raw: bytes, limit: int) -> bytes:
    decoder = zstandard.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW)
    try:
        announced = zstandard.frame_content_size(raw)  # -1: the frame does not say
        decoded = decoder.stream_reader(io.BytesIO(raw), read_across_frames=True).read(limit + 1)
    except zstandard.ZstdError as error:
        raise Invalid(f"the body is not valid zstd: {error}", field="Content-Encoding") from None
    if len(decoded) < min(announced, limit + 1):
        raise Invalid("the body is not one complete zstd frame", field="Content-Encoding")
    return decoded


def parse_json(raw: bytes, *, constants: bool = False) -> Any:
    """Parse ``raw``; with ``constants`` the numbers ``NaN`` and ``Infinity``, which JSON lacks, are understood.

    Raises:
        Invalid: not strict JSON in UTF-8, or a string with NUL (the field is named).
    """
    try:
        document = pieces.loads(raw)
    except orjson.JSONDecodeError as error:
        if not constants or not (b"NaN" in raw or b"Infinity" in raw):
            if (path := _path_of_infinity(raw)) is not None:
                raise Invalid(f"{path or 'the body'} must be a finite number", field=path or None) from None
            raise Invalid(f"the body is not valid JSON: {error.msg} at byte {error.pos}") from None
        document = _with_constants(raw)
    if _is_deep(raw, document):
        raise Invalid(f"the body is nested deeper than {_MAX_DEPTH} levels", details={"limit": _MAX_DEPTH})
    if b"\\u0000" in raw and (path := _path_of_nul(document, "")) is not None:
        raise Invalid("strings must not contain NUL", field=path or None)
    return document


def _is_deep(raw: bytes, document: Any) -> bool:
    """Say whether there are containers below the deepest level that may have some."""
    if raw.count(b"[") + raw.count(b"{") <= _MAX_DEPTH:
        return False
    level: list[Any] = [document]
    for _ in range(_MAX_DEPTH):
        level = [inner for container in level for inner in _containers(container)]
    return bool(level)


def _containers(container: Any) -> Iterable[Any]:
    inner: Collection[Any] = ()
    if isinstance(container, dict):
        inner = cast("dict[str, Any]", container).values()
    elif isinstance(container, list):
        inner = cast("list[Any]", container)
    if {list, dict}.isdisjoint(map(type, inner)):  # most are long lists of numbers
        return ()
    return [one for one in inner if isinstance(one, dict | list)]


def _with_constants(raw: bytes) -> Any:
    try:
        document = json.loads(raw.decode())
        orjson.dumps(document)  # refuses what strict JSON cannot hold either: lone surrogates, too deep, too long
    except (ValueError, TypeError, RecursionError) as error:
        raise Invalid(f"the body is not valid JSON: {str(error)[:200]}") from None
    return document


def _path_of_infinity(raw: bytes) -> str | None:
    """Return where NaN, Infinity or a number beyond a double stands in a body that is JSON but for that."""
    if len(raw) > _MAX_EXPLAINED:
        return None
    try:
        document: Any = json.loads(raw)
        return _path_to(document, "", lambda value: isinstance(value, float) and not math.isfinite(value))
    except (ValueError, RecursionError):
        return None


def _path_to(value: Any, path: str, wanted: Callable[[Any], bool]) -> str | None:
    if wanted(value):
        return path
    inner: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        inner = ((f"{path}.{key}" if path else key, one) for key, one in cast("dict[str, Any]", value).items())
    elif isinstance(value, list):
        inner = ((f"{path}[{index}]", one) for index, one in enumerate(cast("list[Any]", value)))
    for where, one in inner:
        if (found := _path_to(one, where, wanted)) is not None:
            return found
    return None


def _path_of_nul(value: Any, path: str) -> str | None:
    if isinstance(value, str):
        return path if "\0" in value else None
    if isinstance(value, dict):
        for key, inner in cast("dict[str, Any]", value).items():
            here = f"{path}.{key}" if path else key
            if "\0" in key:
                return here.replace("\0", "\\u0000")
            if (found := _path_of_nul(inner, here)) is not None:
                return found
    elif isinstance(value, list):
        for index, inner in enumerate(cast("list[Any]", value)):
            if (found := _path_of_nul(inner, f"{path}[{index}]")) is not None:
                return found
    return None


def field_path(location: Iterable[str | int]) -> str:
    """Return ``("lora", "ranks", 3)`` as ``lora.ranks[3]``."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def invalid_from(errors: Iterable[Mapping[str, Any]]) -> Invalid:
    """Return the refusal for pydantic's ``errors``: the first one, with its field; inputs are never repeated."""
    first = next(iter(errors))
    location = tuple(first["loc"])
    source, *rest = location if location else ("body",)
    path = field_path(rest if source in ("body", "query", "path", "header") else location)
    reason = first["msg"].removeprefix("Value error, ")
    match first["type"]:
        case "extra_forbidden":
            reason = f"unknown field {path}"
        case "model_type" | "model_attributes_type" | "dict_type" if path:
            reason = f"{path} must be an object"
        case "missing" if not path:
            reason = "a JSON body is required"
        case "int_type" | "int_from_float" if isinstance(first.get("input"), float) and abs(first["input"]) >= 2**63:
            reason = f"{path} must be an integer between -{2**63} and {2**63 - 1}"
        case _ if path:
            reason = f"{path}: {reason[:1].lower()}{reason[1:]}"
        case _:
            pass
    return Invalid(reason, field=path or None)
