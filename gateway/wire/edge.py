"""The outermost layer: request ids, one log line per request, and the last word on unplanned exceptions."""

import re
import secrets
import time

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.core.tracing import Span, SpanKind, Tracer, belonging_to

HEADER = "X-Request-Id"
_ACCEPTABLE = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)


class RequestEdge:
    """Pure ASGI middleware.

    A request id comes from the caller's ``X-Request-Id`` when that is 1 to 64 of ``A-Za-z0-9._-``, else it is new. It
    is in ``request.state.request_id``, in every log line of the request and in the answer's header.
    """

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer
        self._log = structlog.stdlib.get_logger("gateway.access")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(HEADER, "")
        request_id = given if _ACCEPTABLE.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id
        started = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                answered = MutableHeaders(scope=message)
                answered[HEADER] = request_id
                answered.update(scope["state"].get("headers", {}))
            await send(message)

        span = self._tracer.span(
            scope["method"],
            SpanKind.SERVER,
            parent=headers.get("traceparent"),
            http__request__method=scope["method"],
            loopline__request_id=request_id,
        )
        with structlog.contextvars.bound_contextvars(request_id=request_id), span as recorded, belonging_to(recorded):
            try:
                await self._app(scope, receive, send_with_id)
            except ClientDisconnect:
                self._log.info("client left before its request was complete", path=scope["path"])
            except Exception:
                # The dialect has already answered in its own shape; the traceback belongs to us alone.
                self._log.exception("request failed", method=scope["method"], path=scope["path"])
                if not status:
                    raise
            finally:
                _describe(recorded, scope, status)
                self._log.info(
                    "request",
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    duration_ms=round((time.perf_counter() - started) * 1000, 1),
                )
                if (observe := scope["state"].get("answered")) is not None:
                    observe(scope["path"], status, time.perf_counter() - started)


def _describe(span: Span, scope: Scope, status: int) -> None:
    """Say by which route the request went, never by which path: that holds names of the caller's."""
    if (route := scope.get("route")) is not None:
        path = f"{scope.get('root_path', '')}{route.path}"
        span.rename(f"{scope['method']} {path}")
        span.set(http__route=path)
    span.set(http__response__status_code=status)
    if not 0 < status < 500:
        span.fail(str(status))
