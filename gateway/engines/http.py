"""HTTP to one engine server. A connection that fails is EngineLost, an answer that takes too long Unavailable."""

from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import contextmanager
from urllib.parse import urlsplit

import aiohttp

from gateway.core.errors import Unavailable
from gateway.core.tracing import Span, SpanKind, Tracer, Unrecorded, current_traceparent
from gateway.engines.answers import EngineLost, error_of
from gateway.engines.documents import document_of

CONNECT_TIMEOUT_S = 5.0
KEEP_ALIVE_S = 4.0  # vLLM closes idle connections after 5 s; a socket must not be picked up in that moment
_JSON: Mapping[str, str] = {"Content-Type": "application/json"}


class EngineHttp:
    """Requests to one server over connections that are kept. ``timeout_s`` is the longest silence of an answer."""

    def __init__(self, url: str, *, key: str, timeout_s: float, tracer: Tracer) -> None:
        self._url = url
        self._tracer = tracer
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=timeout_s)
        self._opened: aiohttp.ClientSession | None = None

    def open(self) -> None:
        self._opened = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            headers=self._headers,
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
        )

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()
            self._opened = None

    async def get(self, path: str, *, timeout_s: float | None = None) -> tuple[int, bytes]:
        """Return status and body."""
        timeout = self._timeout if timeout_s is None else aiohttp.ClientTimeout(total=timeout_s)
        with _translated():
            async with self._session.get(f"{self._url}{path}", timeout=timeout, allow_redirects=False) as response:
                return response.status, await response.read()

    async def post(self, path: str, content: bytes, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        """Send JSON; return status and body."""
        with _translated(), self._calling(path) as span:
            async with self._session.post(
                f"{self._url}{path}",
                data=content,
                headers={**_JSON, **(headers or {}), **_named(span)},
                allow_redirects=False,
            ) as response:
                span.set(http__response__status_code=response.status)
                return response.status, await response.read()

    async def lines(self, path: str, content: bytes, headers: Mapping[str, str]) -> AsyncGenerator[bytes]:
        """Send JSON; yield the answer's lines as they come. Closing the generator closes the connection.

        Raises:
            GatewayError: what ``error_of`` makes of an answer that is no success.
        """
        with _translated(), self._calling(path) as span:
            async with self._session.post(
                f"{self._url}{path}",
                data=content,
                headers={**_JSON, **headers, **_named(span)},
                allow_redirects=False,
            ) as response:
                span.set(http__response__status_code=response.status)
                if response.status >= 400:
                    raise error_of(response.status, document_of(await response.read()))
                rest = b""
                async for piece in response.content.iter_any():
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        yield line

    @contextmanager
    def _calling(self, path: str) -> Generator[Span]:
        """A span around a call, where the call belongs to one."""
        parent = current_traceparent()
        if parent is None:
            yield Unrecorded()
            return
        server = urlsplit(self._url)
        with self._tracer.span(
            f"POST {path}",
            SpanKind.CLIENT,
            parent=parent,
            http__request__method="POST",
            server__address=server.hostname or "",
            server__port=server.port or 0,
        ) as span:
            yield span

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:
            raise RuntimeError("the engine's client is not open")
        return self._opened


def _named(span: Span) -> Mapping[str, str]:
    return {} if span.traceparent is None else {"traceparent": span.traceparent}


@contextmanager
def _translated() -> Generator[None]:
    try:
        yield
    except aiohttp.ConnectionTimeoutError as error:
        raise EngineLost("the engine cannot be reached") from error
    except TimeoutError as error:
        raise Unavailable("the engine did not answer in time", code="engine_timeout") from error
    except aiohttp.ClientError as error:
        raise EngineLost("the engine cannot be reached") from error
