"""The proxy in front of a server that counts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.crash.proxy import ChaosProxy, Fate, Odds

CALM = {"duplicate": 0.0, "drop": 0.0, "delay": 0.0, "reorder": 0.0, "cut": 0.0}


class Counting:
    """An HTTP server that answers with the bodies it has received so far."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0)
        self.bodies.append(await reader.readexactly(length))
        answer = b" ".join(self.bodies)
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(answer), answer))
        await writer.drain()
        writer.close()


@asynccontextmanager
async def proxied(**odds: float) -> AsyncIterator[tuple[Counting, ChaosProxy, httpx.AsyncClient]]:
    counting = Counting()
    server = await asyncio.start_server(counting.serve, "127.0.0.1", 0)
    upstream = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    proxy = ChaosProxy(upstream, seed=1, odds=Odds(**(CALM | odds)))
    async with server, proxy.running(), httpx.AsyncClient(base_url=proxy.url, trust_env=False) as client:
        yield counting, proxy, client


async def test_a_calm_proxy_passes_requests_and_answers_unchanged() -> None:
    async with proxied() as (counting, proxy, client):
        answers = [(await client.post("/x", content=body)).content for body in (b"a", b"b")]
    assert answers == [b"a", b"a b"]
    assert counting.bodies == [b"a", b"b"]
    assert proxy.fates == {Fate.PASS: 2}


async def test_a_duplicate_reaches_the_server_twice_and_is_answered_once() -> None:
    async with proxied(duplicate=1.0) as (counting, _, client):
        assert (await client.post("/x", content=b"a")).status_code == 200
    assert counting.bodies == [b"a", b"a"]


async def test_a_dropped_reply_is_an_error_though_the_server_did_it() -> None:
    async with proxied(drop=1.0) as (counting, _, client):
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/x", content=b"a")
    assert counting.bodies == [b"a"]


async def test_a_cut_reply_is_an_error() -> None:
    async with proxied(cut=1.0) as (_, _, client):
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/x", content=b"abcdef")


async def test_a_held_request_is_overtaken_by_the_next() -> None:
    async with proxied(reorder=1.0, hold_s=30.0) as (counting, proxy, client):
        first = asyncio.create_task(client.post("/x", content=b"first"))
        while not proxy.fates:
            await asyncio.sleep(0)
        proxy._odds = Odds(**CALM)
        await client.post("/x", content=b"second")
        await first
    assert counting.bodies == [b"second", b"first"]
