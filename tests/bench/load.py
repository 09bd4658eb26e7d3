"""A closed loop of HTTP requests from a process of its own, cheap enough to share a machine with what it measures.

``python -m tests.bench.load URL`` reads one JSON object from standard input (``Load``) and writes one (``Measured``).
Each of ``concurrency`` connections sends the same bytes again as soon as the answer is complete; answers are only told
apart by status, length and end. Nothing is parsed beyond HTTP, which is C (httptools on uvloop).
"""

import asyncio
import dataclasses
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import uvloop


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What to send: ``body`` to ``path``, ``requests`` times, ``concurrency`` at a time."""

    url: str
    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    concurrency: int
    requests: int

    @property
    def content(self) -> bytes:
        body = json.dumps(self.body).encode()
        headers = {**self.headers, "Host": urlsplit(self.url).netloc, "Content-Type": "application/json"}
        lines = [f"POST {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What came of it. ``latencies_s`` are of whole answers, ``firsts_s`` to the first byte of an answer's body."""

    seconds: float
    cpu_seconds: float  # of this process
    latencies_s: list[float] = field(default_factory=list[float])
    firsts_s: list[float] = field(default_factory=list[float])
    statuses: dict[str, int] = field(default_factory=dict[str, int])
    body_bytes: int = 0

    @property
    def throughput(self) -> float:
        """Answers a second."""
        return len(self.latencies_s) / self.seconds

    def at(self, share: float) -> float:
        """Return the latency that ``share`` of the answers do not exceed."""
        return _at(self.latencies_s, share)

    def first_at(self, share: float) -> float:
        """As ``at``, to the first byte."""
        return _at(self.firsts_s, share)


def _at(values: Sequence[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1]


class _Connection(asyncio.Protocol):
    """One connection: writes a request, counts its answer, and writes the next."""

    def __init__(self, loop: "_Loop") -> None:
        self._loop = loop
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._sent = self._first = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has its methods, not its class
        self._send()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self._first = self._first or time.perf_counter()
        self._loop.body_bytes += len(data)

    def on_message_complete(self) -> None:
        now = time.perf_counter()
        self._loop.answered(str(self._parser.get_status_code()), now - self._sent, (self._first or now) - self._sent)
        if not self._parser.should_keep_alive():
            raise RuntimeError("the server closes connections")
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        self._loop.lost(exc)

    def _send(self) -> None:
        assert self._transport is not None
        if not self._loop.take():
            self._transport.close()
            return
        self._sent, self._first = time.perf_counter(), 0.0
        self._transport.write(self._loop.content)


class _Loop:
    """The connections of one load."""

    def __init__(self, load: Load) -> None:
        self.content = load.content
        self.body_bytes = 0
        self.latencies_s: list[float] = []
        self.firsts_s: list[float] = []
        self.statuses: dict[str, int] = {}
        self._load = load
        self._left, self._open = load.requests, load.concurrency
        self._done = asyncio.get_running_loop().create_future()

    def take(self) -> bool:
        self._left -= 1
        return self._left >= 0

    def answered(self, status: str, latency_s: float, first_s: float) -> None:
        self.statuses[status] = self.statuses.get(status, 0) + 1
        self.latencies_s.append(latency_s)
        self.firsts_s.append(first_s)

    def lost(self, error: Exception | None) -> None:
        self._open -= 1
        if not self._done.done():
            if error is not None or (self._left > 0):
                self._done.set_exception(error or ConnectionError("the server closed a connection"))
            elif not self._open:
                self._done.set_result(None)

    async def run(self) -> Measured:
        where = urlsplit(self._load.url)
        started, cpu = time.perf_counter(), time.process_time()
        for _ in range(self._load.concurrency):
            await asyncio.get_running_loop().create_connection(lambda: _Connection(self), where.hostname, where.port)
        await self._done
        return Measured(
            seconds=time.perf_counter() - started,
            cpu_seconds=time.process_time() - cpu,
            latencies_s=self.latencies_s,
            firsts_s=self.firsts_s,
            statuses=self.statuses,
            body_bytes=self.body_bytes,
        )


async def run(load: Load) -> Measured:
    return await _Loop(load).run()


def main() -> int:
    measured = uvloop.run(run(Load(**json.load(sys.stdin))))
    json.dump(dataclasses.asdict(measured), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
