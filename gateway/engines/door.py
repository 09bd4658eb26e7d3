"""The door of a vLLM server: everything but its health and its counters needs the key.

vLLM asks for its key only under some prefixes (``/v1``, ``/inference``). Other paths compute as well, for nobody's
bill (``/invocations``, ``/generative_scoring``), or load adapters (``/adapters``). The command line names it as a
middleware.
"""

import hashlib
import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY = "VLLM_API_KEY"
OPEN = frozenset({"/health", "/metrics"})
_REFUSAL = b'{"error":{"message":"Unauthorized","type":"Unauthorized","param":null,"code":401}}'

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Door:
    """ASGI middleware. The key is the environment's ``VLLM_API_KEY``; without one nobody is let in."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._expected = _digest(f"Bearer {os.environ.get(KEY, '')}".encode()) if os.environ.get(KEY) else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN or self._knows(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(_REFUSAL)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _REFUSAL})

    def _knows(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(_digest(given), self._expected)


def _digest(text: bytes) -> bytes:
    """Return what takes as long to compare whatever was given."""
    return hashlib.sha256(text).digest()
