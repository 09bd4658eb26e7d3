"""The route class of every dialect: first who is calling, then the body, then the handler.

A stranger's body is never read, and a body that is not strict JSON never reaches a schema.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from gateway.auth.keys import authenticate
from gateway.core.errors import Unauthenticated
from gateway.core.principals import Principal
from gateway.wire.bodies import StrictRequest


class DialectRoute(APIRoute):
    """A route behind a bearer key, with a strict JSON body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            request.state.principal = await _authenticate(request)
            strict = StrictRequest(request.scope, request.receive, max_bytes=request.state.max_body_bytes)
            if strict.method not in ("GET", "HEAD", "OPTIONS"):
                await strict.load()
            return await handle(strict)

        return guarded


async def _authenticate(request: Request) -> Principal:
    scheme, _, text = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not text:
        raise Unauthenticated("missing or invalid API key; send 'Authorization: Bearer tml-...'")
    async with request.state.database.read() as unit:
        return await authenticate(unit, request.state.keyring, text.strip(), at=request.state.clock.now())
