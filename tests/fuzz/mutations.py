"""Ways to spoil a real request: values of the wrong kind or size, bodies that are no JSON, bombs, strange paths."""

import copy
import gzip
import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any
from urllib.parse import quote

import httpx
import zstandard

_LITERALS = {"@@1e999@@": "1e999", "@@-1e999@@": "-1e999", "@@huge@@": "9" * 400, "@@deep@@": "[" * 900 + "]" * 900}

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**40, 0.5, -0.0, 1e308, 5e-324,
    float("nan"), float("inf"), "@@1e999@@", "@@-1e999@@", "@@huge@@", "@@deep@@", "", " ", "a", "a" * 70_000, "\0",
    "a\0b", "\ud800", "\udfff\ud800", "\u202e", "\u2028", "../../etc/passwd", "'; DROP TABLE keys; --", "{{7*7}}",
    "<|im_start|>", "%00", "NaN", "latest", "sess-", "tinker://", "arn:aws:", [], [[]], [None], [True], [-1], [2**63],
    ["a"], [97] * 50_000, {}, {"": ""}, {"a": {"b": {}}}, {"type": "text"},
)  # fmt: skip

WORDS = (
    "", ".", "..", "%00", "%2e%2e%2f", "a" * 3000, "\xe9", "\u202e", "\ud83d", "a/b", "0", "-1", "9" * 30, "sess-", "@",
    "a@0",
)  # fmt: skip
QUERIES = ("limit", "after", "wait", "kind", "since", "by", "offset", "force", "unknown", "format", "tag")
HEADERS = ("X-Request-Id", "Idempotency-Key", "X-Loopline-Tag", "Accept", "Content-Type", "Range", "Host")
NAMES = ("unknown", "model", "n", "\0", "stream", "logprobs", "seed")
ENCODINGS = ("br", "gzip", "zstd", "gzip, gzip", "x")
MEDIA_TYPES = ("text/plain", "application/xml", "application/x-protobuf", "multipart/form-data", "a")
BODIES = (b"null", b"1", b'"a"', b"[]", b"true", b"\xef\xbb\xbf{}", b"{}{}", b"\0")
_RECOMPUTED = ("content-length", "host", "transfer-encoding")

Spoil = Callable[[random.Random, httpx.Request], httpx.Request]


def spoiled(random: random.Random, request: httpx.Request) -> httpx.Request:
    """Return ``request`` with something wrong, most often a value in its JSON."""
    way = random.choices((value, raw, path, header), weights=(12, 4, 3, 2) if request.content else (0, 2, 6, 2))[0]
    return way(random, request)


def value(random: random.Random, request: httpx.Request) -> httpx.Request:
    """Replace, drop or add one to three values of a JSON body."""
    try:
        document = json.loads(request.content)
    except ValueError:
        return raw(random, request)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        document = _changed(random, document)
    text = json.dumps(document)
    for sign, literal in _LITERALS.items():
        text = text.replace(f'"{sign}"', literal)
    return _with(request, text.encode())


def raw(random: random.Random, request: httpx.Request) -> httpx.Request:
    """Make the body something else than the JSON it claims to be."""
    body = request.content or b"{}"
    cut = random.randrange(len(body) + 1)
    flip = bytearray(body)
    if flip:
        flip[cut % len(flip)] ^= 1 << random.randrange(8)
    match random.randrange(12):
        case 0:
            return _with(request, body[:cut])
        case 1:
            return _with(request, bytes(flip))
        case 2:
            return _with(request, body[:cut] + b"\xff\xfe" + body[cut:])
        case 3:
            return _with(request, b"[" * 200_000)
        case 4:
            return _with(request, b'{"a":' * 50_000 + b"1" + b"}" * 50_000)
        case 5:
            return _with(request, _bomb("gzip"), **{"Content-Encoding": "gzip"})
        case 6:
            return _with(request, _bomb("zstd"), **{"Content-Encoding": "zstd"})
        case 7:
            return _with(request, body, **{"Content-Encoding": random.choice(ENCODINGS)})
        case 8:
            kind = random.choice(
                ("text/plain", "application/xml", "application/x-protobuf", "multipart/form-data", "a")
            )
            return _with(request, body, **{"Content-Type": kind})
        case 9:
            return _with(request, b"")
        case 10:
            return _with(
                request, random.choice((b"null", b"1", b'"a"', b"[]", b"true", b"\xef\xbb\xbf{}", b"{}{}", b"\0"))
            )
        case _:
            return _with(request, random.randbytes(random.randrange(300)))


def path(random: random.Random, request: httpx.Request) -> httpx.Request:
    """Change a part of the path, or the query."""
    parts = request.url.raw_path.decode().partition("?")[0].split("/")
    query = request.url.query.decode()
    if random.random() < 0.6:
        at = random.randrange(2, len(parts)) if len(parts) > 2 else len(parts) - 1
        parts[at] = quote(random.choice(WORDS), safe="%", errors="surrogatepass")
    else:
        name = random.choice(
            ("limit", "after", "wait", "kind", "since", "by", "offset", "force", "unknown", "format", "tag")
        )
        query = f"{name}={quote(random.choice(WORDS), safe='', errors='surrogatepass')}"
    target = "/".join(parts) + (f"?{query}" if query else "")
    url = request.url.copy_with(raw_path=target.encode())
    return httpx.Request(request.method, url, headers=_headers(request), content=request.content)


def header(random: random.Random, request: httpx.Request) -> httpx.Request:
    """Give a header a strange value."""
    name = random.choice(
        ("X-Request-Id", "Idempotency-Key", "X-Loopline-Tag", "Accept", "Content-Type", "Range", "Host")
    )
    told = random.choice((b"", b"a" * 5000, b"\xff\xfe", b"a\tb", b"'\"", b"null", b"bytes=5-1", b"*/*;q=9"))
    raised = [(key, text) for key, text in _headers(request).items() if key.lower() != name.lower()]
    encoded = [(key.encode(), text.encode()) for key, text in raised]
    return httpx.Request(
        request.method, request.url, headers=[*encoded, (name.encode(), told)], content=request.content
    )


@cache
def _bomb(encoding: str) -> bytes:
    """Return a few kilobytes that unpack to 80 MiB."""
    content = b'{"prompt": "' + b"a" * (80 * 2**20) + b'"}'
    return gzip.compress(content, 1) if encoding == "gzip" else zstandard.compress(content)


def _changed(random: random.Random, document: Any) -> Any:
    places = list(_places(document))
    if not places:
        return copy.deepcopy(random.choice(VALUES))
    holder, key = random.choice(places)
    match random.randrange(8):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[random.choice(NAMES)] = copy.deepcopy(random.choice(VALUES))
        case _:
            holder[key] = copy.deepcopy(random.choice(VALUES))
    return document


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in list(inner)[:50]:
        yield value, key
        yield from _places(below)


def _headers(request: httpx.Request) -> dict[str, str]:
    return {key: text for key, text in request.headers.items() if key not in _RECOMPUTED}


def _with(request: httpx.Request, content: bytes, **headers: str) -> httpx.Request:
    kept = {key: text for key, text in _headers(request).items() if key not in {name.lower() for name in headers}}
    if content and "content-type" not in kept and "Content-Type" not in headers:
        kept["content-type"] = "application/json"
    return httpx.Request(request.method, request.url, headers={**kept, **headers}, content=content)
