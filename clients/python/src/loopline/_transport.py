"""HTTP to one gateway: keys, retries, errors. Everything else in this package speaks through ``Transport``.

A request that does work carries an Idempotency-Key made once per call, so a retry after a lost answer returns what the
first try did.
"""

import json
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from loopline._retry import RETRYABLE_STATUSES, Answer, RetryPolicy
from loopline.errors import ApiError, ConnectionFailed, ResultMismatchError, api_error_class

M = TypeVar("M", bound=BaseModel)

log = logging.getLogger("loopline")

MOUNT = "/training/v1"
POLL_S = 30.0  # how long the gateway is asked to hold a poll; half the timeout when that is less
PAGE = 100


def encode(body: Any) -> bytes:
    """Return compact JSON.

    Raises:
        ValueError: NaN or an infinity, which JSON has no word for.
    """
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()


class Transport:
    """Requests below one base URL with one API key. To be used on one event loop only."""

    def __init__(
        self,
        *,
        base_url: str,
        api_key: str,
        timeout_s: float,
        max_connections: int,
        retry: RetryPolicy,
        transport: httpx.AsyncBaseTransport | None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.retry = retry
        self._troubled = False
        self.poll_s = min(POLL_S, timeout_s / 2)
        self._http = httpx.AsyncClient(
            base_url=self.base_url + MOUNT,
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=_timeout(timeout_s),
            limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
            transport=transport,
        )

    async def aclose(self) -> None:
        await self._http.aclose()

    async def ask(
        self,
        method: str,
        path: str,
        *,
        during: str,
        content: bytes | None = None,
        params: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
        timeout_s: float | None = None,
        media_type: str = "application/json",
    ) -> Answer:
        """Send one request, retries included, and return the answer, an error status too.

        ``timeout_s`` is how long one try may stay without an answer, when that is not the transport's.

        Raises:
            ConnectionFailed: no answer came.
        """
        headers = {"Content-Type": media_type} if content is not None else {}
        if idempotency_key is not None:
            headers["Idempotency-Key"] = idempotency_key

        timeout = self._http.timeout if timeout_s is None else _timeout(timeout_s)

        async def attempt() -> httpx.Response:
            response = await self._http.request(
                method, path, content=content, params=params, headers=headers, timeout=timeout
            )
            self._troubled = self._troubled and response.status_code in RETRYABLE_STATUSES
            return response

        def on_wait(trouble: str) -> None:
            if not self._troubled:  # one line for all the calls that wait, not one each
                log.warning("%s: %s; trying again for up to %.0f s", during, trouble, self.retry.give_up_after_s)
            self._troubled = True

        try:
            return await self.retry.answer(attempt, on_wait)
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            raise ConnectionFailed(f"{during}: no answer from {self.base_url}: {reason}", during) from error

    async def get(self, kind: type[M], path: str, /, *, during: str, **params: str | float | None) -> M:
        """Return the parsed answer of a GET; parameters that are None are left out.

        Raises:
            ApiError: the gateway refused.
            ConnectionFailed: no answer came.
            ResultMismatchError: the answer is not a ``kind``.
        """
        given = {name: value for name, value in params.items() if value is not None}
        answer = await self.ask("GET", path, during=during, params=given)
        return parse(kind, answer.response, during)

    async def get_bytes(self, path: str, *, during: str) -> bytes:
        """Return the raw body of a GET; raises as ``get``."""
        answer = await self.ask("GET", path, during=during)
        return checked(answer.response, during).content

    async def post(self, kind: type[M], path: str, body: bytes, *, during: str, timeout_s: float | None = None) -> M:
        """Do one piece of work exactly once and return the parsed answer; raises as ``get``."""
        answer = await self.ask(
            "POST", path, during=during, content=body, idempotency_key=new_key(), timeout_s=timeout_s
        )
        return parse(kind, answer.response, during)

    async def delete(self, kind: type[M], path: str, *, during: str) -> M:
        """Return the parsed answer of a DELETE; raises as ``get``."""
        answer = await self.ask("DELETE", path, during=during)
        return parse(kind, answer.response, during)

    async def send(
        self, path: str, content: bytes, *, media_type: str, params: Mapping[str, Any], during: str, timeout_s: float
    ) -> Answer:
        """Send a file, exactly once however often it is retried; raises as ``ask``."""
        return await self.ask(
            "POST",
            path,
            during=during,
            content=content,
            params=params,
            idempotency_key=new_key(),
            timeout_s=timeout_s,
            media_type=media_type,
        )

    async def discard(self, path: str, *, during: str) -> None:
        """DELETE what is answered with nothing; raises as ``get``."""
        checked((await self.ask("DELETE", path, during=during)).response, during)

    @asynccontextmanager
    async def stream(self, url: str, *, start: int) -> AsyncGenerator[httpx.Response]:
        """Ask for a file from byte ``start`` on. Raises httpx.TransportError."""
        headers = {"Range": f"bytes={start}-"} if start else {}
        async with self._http.stream("GET", url, headers=headers) as response:
            yield response

    async def pages(self, kind: type[M], path: str, /, *, during: str, **params: str | int | None) -> AsyncIterator[M]:
        """Yield every item of a paged list; raises as ``get``."""
        after: str | int | None = params.pop("after", None)
        while True:
            page = await self.get(_Page, path, during=during, limit=PAGE, after=after, **params)
            for item in page.data:
                yield validate(kind, item, during)
            if page.next is None:
                return
            after = page.next


def _timeout(seconds: float) -> httpx.Timeout:
    # A free connection may be long in coming when many samples are in flight: waiting for it is no error.
    return httpx.Timeout(seconds, connect=min(seconds, 10.0), pool=None)


class _Page(BaseModel):
    data: list[Any]
    next: str | int | None = None


def new_key() -> str:
    """Return a fresh Idempotency-Key."""
    return uuid.uuid4().hex


def segment(name: str) -> str:
    """Return ``name`` as one segment of a path."""
    return quote(name, safe="")


def checked(response: httpx.Response, during: str) -> httpx.Response:
    """Return a successful response as it is.

    Raises:
        ApiError: the branch that fits the status, naming ``during``.
    """
    if response.is_success:
        return response
    raise _error_of(response, during)


def parse(kind: type[M], response: httpx.Response, during: str) -> M:
    """Return the body of a successful response as a ``kind``.

    Raises:
        ApiError: the gateway refused.
        ResultMismatchError: the body is something else.
    """
    try:
        body = checked(response, during).json()
    except ValueError as error:
        if isinstance(error, ApiError):
            raise
        raise ResultMismatchError(f"{during}: the answer is not JSON: {error}") from None
    return validate(kind, body, during)


def validate(kind: type[M], body: Any, during: str) -> M:
    """Return ``body`` as a ``kind``.

    Raises:
        ResultMismatchError: it is something else.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise ResultMismatchError(f"{during}: the answer is not a {kind.__name__}: {error}") from None


def _error_of(response: httpx.Response, during: str) -> ApiError:
    status = response.status_code
    try:
        body: Any = response.json()
    except ValueError:
        body = None
    error: dict[str, Any] = {}
    if isinstance(body, dict) and isinstance(found := cast("dict[str, Any]", body).get("error"), dict):
        error = cast("dict[str, Any]", found)
    return api_error_class(status)(
        str(error.get("message") or response.text[:200] or response.reason_phrase),
        status=status,
        code=str(error.get("code") or "unknown"),
        kind=str(error.get("kind") or ("internal" if status >= 500 else "unknown")),
        field=error.get("field"),
        details=error.get("details"),
        request_id=error.get("request_id") or response.headers.get("X-Request-Id"),
        during=during,
    )
