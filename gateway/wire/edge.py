"""The outermost layer: request ids, one log line per request, and the last word on unplanned exceptions."""

import re
import secrets
import time

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Id"
_ACCEPTABLE = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)


class RequestEdge:
    """Pure ASGI middleware.

    A request id comes from the caller's ``X-Request-Id`` when that is 1 to 64 of ``A-Za-z0-9._-``, else it is new. It
    is in ``request.state.request_id``, in every log line of the request and in the answer's header.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._log = structlog.stdlib.get_logger("gateway.access")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
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

        with structlog.contextvars.bound_contextvars(request_id=request_id):
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
                self._log.info(
                    "request",
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    duration_ms=round((time.perf_counter() - started) * 1000, 1),
                )
                if (observe := scope["state"].get("answered")) is not None:
                    observe(scope["path"], status, time.perf_counter() - started)
