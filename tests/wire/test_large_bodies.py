"""Large JSON bodies: parsed as any other, while the other requests of the process go on."""

import asyncio
import random
import sys
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from starlette.types import Message

from gateway.core.errors import Invalid
from gateway.wire import pieces
from gateway.wire.bodies import StrictRequest, parse_json

LENGTH = 2048


def datum(rng: random.Random) -> dict[str, Any]:
    tokens = [rng.randrange(49152) for _ in range(LENGTH)]
    numbers = [round(rng.uniform(-7, 0), 6) for _ in range(LENGTH)]
    return {"model_input": tokens, "loss_fn_inputs": {"target_tokens": tokens, "logprobs": numbers}}


def batch(megabytes: int) -> bytes:
    one = datum(random.Random(1))
    return orjson.dumps({"seq": 1, "data": [one] * (megabytes * 2**20 // len(orjson.dumps(one)))})


def documents() -> Iterator[Any]:
    rng = random.Random(2)
    yield {"data": [datum(rng) for _ in range(40)], "loss_fn": "cross_entropy", "seq": 7}
    yield [rng.uniform(-1, 1) for _ in range(100_000)]
    yield {"tokens": list(range(300_000)), "empty": [], "none": None}
    yield [[], {}, *([1, "a,b]", None, True] for _ in range(100_000))]
    yield {"text": 'é"[{,' * 300_000}
    yield {"flags": [True, False, None] * 100_000}
    deep: Any = list(range(300_000))
    for _ in range(20):
        deep = {"in": [deep]}
    yield deep


@pytest.mark.parametrize("option", [0, orjson.OPT_INDENT_2])
def test_a_large_document_is_what_it_is_when_parsed_at_once(option: int) -> None:
    for document in documents():
        text = orjson.dumps(document, option=option)
        assert len(text) >= pieces.LARGE_BYTES
        assert pieces.loads(text) == document


@pytest.mark.parametrize(
    "spoilt",
    [b"1,,", b",", b"1 2", b"1]", b"[1", b"01", b"NaN", b"1e999", b'"\xff"', b'"\\ud800"', b'{"a":1,}', b"tru"],
)
def test_what_is_no_json_is_refused_as_in_a_small_body(spoilt: bytes) -> None:
    numbers = b"1," * (pieces.LARGE_BYTES // 2)
    for raw in (b'{"data":[%b%b,1]}', b'{"data":[[%b%b,1],2]}', b"[%b%b]"):
        with pytest.raises(orjson.JSONDecodeError) as at_once:
            orjson.loads(raw % (numbers, spoilt))
        with pytest.raises(orjson.JSONDecodeError) as in_pieces:
            pieces.loads(raw % (numbers, spoilt))
        assert (in_pieces.value.msg, in_pieces.value.pos) == (at_once.value.msg, at_once.value.pos)


def test_no_call_of_the_parser_takes_much_of_a_large_body() -> None:
    raw, calls = batch(8), 0

    def count(_: Any, event: str, called: Any) -> None:
        nonlocal calls
        calls += event == "c_call" and called is orjson.loads

    sys.setprofile(count)
    try:
        pieces.loads(raw)
    finally:
        sys.setprofile(None)
    assert calls > len(raw) / (2 * pieces.PIECE_BYTES)


async def test_other_requests_have_their_turns_while_a_large_body_is_parsed() -> None:
    raw, turns, parsed = batch(8), 0, asyncio.Event()

    async def receive() -> Message:
        return {"type": "http.request", "body": raw, "more_body": False}

    async def load() -> StrictRequest:
        scope = {"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")]}
        request = StrictRequest(scope, receive, max_bytes=2**25, media_types={"application/json"})
        await request.load()
        parsed.set()
        return request

    loading = asyncio.create_task(load())
    while not parsed.is_set():
        await asyncio.sleep(0)
        turns += 1
    assert (await (await loading).json())["data"] == orjson.loads(raw)["data"]
    assert turns > 20


def test_a_large_body_is_refused_by_its_field() -> None:
    raw = orjson.dumps({"data": ["x" * pieces.LARGE_BYTES, {"name": "a\0b"}]})
    with pytest.raises(Invalid) as refused:
        parse_json(raw)
    assert refused.value.field == "data[1].name"


def test_nesting_is_bounded_and_brackets_in_a_text_are_no_nesting() -> None:
    assert parse_json(b"[" * 200 + b"]" * 200) is not None
    assert parse_json(b'{"text": "' + b"[" * 300_000 + b'"}') == {"text": "[" * 300_000}
    for body in (b"[" * 201 + b"]" * 201, b'{"a":' * 201 + b"1" + b"}" * 201, b'["]]]", ' + b"[" * 200 + b"]" * 201):
        with pytest.raises(Invalid, match="nested deeper than 200 levels"):
            parse_json(body)
