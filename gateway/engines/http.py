"""HTTP to one engine server. A connection that fails is EngineLost, an answer that takes too long Unavailable."""

from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import contextmanager

import aiohttp

from gateway.core.errors import Unavailable
from gateway.engines.answers import EngineLost, error_of
from gateway.engines.documents import document_of

CONNECT_TIMEOUT_S = 5.0
KEEP_ALIVE_S = 4.0  # vLLM closes idle connections after 5 s; a socket must not be picked up in that moment
_JSON: Mapping[str, str] = {"Content-Type": "application/json"}


class EngineHttp:
    """Requests to one server over connections that are kept. ``timeout_s`` is the longest silence of an answer."""

    def __init__(self, url: str, *, key: str, timeout_s: float) -> None:
        self._url = url
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
        with _translated():
            async with self._session.post(
                f"{self._url}{path}", data=content, headers={**_JSON, **(headers or {})}, allow_redirects=False
            ) as response:
                return response.status, await response.read()

    async def lines(self, path: str, content: bytes, headers: Mapping[str, str]) -> AsyncGenerator[bytes]:
        """Send JSON; yield the answer's lines as they come. Closing the generator closes the connection.

        Raises:
            GatewayError: what ``error_of`` makes of an answer that is no success.
        """
        with _translated():
            async with self._session.post(
                f"{self._url}{path}", data=content, headers={**_JSON, **headers}, allow_redirects=False
            ) as response:
                if response.status >= 400:
                    raise error_of(response.status, document_of(await response.read()))
                rest = b""
                async for piece in response.content.iter_any():
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        yield line

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:
            raise RuntimeError("the engine's client is not open")
        return self._opened


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
