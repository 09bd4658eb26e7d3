"""A user-space proxy between client and gateway that does to requests what networks do.

A request is passed on, passed on twice, passed on with its reply thrown away, held back, held back until another one
has overtaken it, or its reply is cut in the middle. Seeded; one HTTP/1.1 request at a time per connection.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum

import h11
import httpx


class Fate(StrEnum):
    PASS = "pass"
    DUPLICATE = "duplicate"
    DROP = "drop"
    DELAY = "delay"
    REORDER = "reorder"
    CUT = "cut"


@dataclass(frozen=True, slots=True, kw_only=True)
class Odds:
    """Shares of 1; what is left passes unharmed. Held requests wait up to ``hold_s``."""

    duplicate: float = 0.2
    drop: float = 0.2
    delay: float = 0.1
    reorder: float = 0.1
    cut: float = 0.02
    hold_s: float = 0.3


class ChaosProxy:
    """Listens on a port of its own while ``running``. ``fates`` counts what it did."""

    def __init__(self, upstream: str, *, seed: int, odds: Odds | None = None) -> None:
        self.fates: Counter[Fate] = Counter()
        self.url = ""
        self._upstream = upstream
        self._odds = odds or Odds()
        self._rng = random.Random(seed)
        self._client = httpx.AsyncClient(
            base_url=upstream, trust_env=False, timeout=60.0, limits=httpx.Limits(max_connections=None)
        )
        self._overtaken = asyncio.Event()
        self._serving: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator["ChaosProxy"]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in self._serving:
                task.cancel()
            await asyncio.gather(*self._serving, return_exceptions=True)
            await self._client.aclose()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, httpx.TransportError, h11.RemoteProtocolError):
            pass  # whoever was talking is gone: exactly what this is for
        finally:
            self._serving.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER)
        while (received := await _read_request(connection, reader)) is not None:
            request, body = received
            fate = self._draw()
            self.fates[fate] += 1
            response = await self._forward(fate, request, body)
            if fate is Fate.DROP:
                return
            head = h11.Response(
                status_code=response.status_code,
                headers=[
                    (name, value)
                    for name, value in response.headers.raw
                    if name.lower() not in (b"transfer-encoding", b"connection", b"content-length", b"content-encoding")
                ]
                + [(b"content-length", str(len(response.content)).encode())],
            )
            writer.write(connection.send(head) or b"")
            if fate is Fate.CUT:
                writer.write(response.content[: len(response.content) // 2])
                await writer.drain()
                return
            writer.write(connection.send(h11.Data(data=response.content)) or b"")
            writer.write(connection.send(h11.EndOfMessage()) or b"")
            await writer.drain()
            if connection.our_state is h11.MUST_CLOSE:
                return
            connection.start_next_cycle()

    async def _forward(self, fate: Fate, request: h11.Request, body: bytes) -> httpx.Response:
        if fate is Fate.DELAY:
            await asyncio.sleep(self._rng.uniform(0, self._odds.hold_s))
        if fate is Fate.REORDER:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._overtaken.wait(), self._odds.hold_s)
        self._overtaken.set()
        self._overtaken = asyncio.Event()
        twice = 2 if fate is Fate.DUPLICATE else 1
        answers = await asyncio.gather(*[self._send(request, body) for _ in range(twice)])
        return self._rng.choice(answers)

    async def _send(self, request: h11.Request, body: bytes) -> httpx.Response:
        headers = [(name, value) for name, value in request.headers if name.lower() != b"connection"]
        return await self._client.request(
            request.method.decode(), request.target.decode(), headers=headers, content=body
        )

    def _draw(self) -> Fate:
        chance, odds = self._rng.random(), self._odds
        for fate in (Fate.DUPLICATE, Fate.DROP, Fate.DELAY, Fate.REORDER, Fate.CUT):
            chance -= getattr(odds, fate.value)
            if chance < 0:
                return fate
        return Fate.PASS


async def _read_request(connection: h11.Connection, reader: asyncio.StreamReader) -> tuple[h11.Request, bytes] | None:
    """Return the next request with its body, None when the client is done."""
    request: h11.Request | None = None
    body = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(65536))
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            assert request is not None
            return request, bytes(body)
        else:  # the connection was closed
            return None
