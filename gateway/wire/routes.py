"""The route class of every dialect: first who is calling, then the body, then the handler.

A stranger's body is never read, and a body that is not strict JSON never reaches a schema.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.datastructures import Headers

from gateway.auth.keys import authenticate
from gateway.core.errors import GatewayError, Unauthenticated
from gateway.core.principals import Principal
from gateway.wire.bodies import StrictRequest


class DialectRoute(APIRoute):
    """A route behind a bearer key, with a strict JSON body."""

    media_types: frozenset[str] = frozenset({"application/json"})

    @staticmethod
    def presented_key(headers: Headers) -> str | None:
        """Return the key that a request shows."""
        scheme, _, text = headers.get("authorization", "").partition(" ")
        return text.strip() if scheme.lower() == "bearer" else None

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            request.state.principal = await _authenticate(request, self.presented_key(request.headers))
            strict = StrictRequest(
                request.scope,
                request.receive,
                max_bytes=request.state.max_body_bytes,
                media_types=self.media_types,
            )
            if strict.method not in ("GET", "HEAD", "OPTIONS"):
                await strict.load()
            try:
                return await handle(strict)
            except (GatewayError, RequestValidationError) as error:
                await self.refused(strict, error)
                raise

        return guarded

    async def refused(self, request: StrictRequest, error: GatewayError | RequestValidationError) -> None:
        """Hear of a refusal before it is answered; what the handler wrote is rolled back after this."""


async def _authenticate(request: Request, text: str | None) -> Principal:
    if not text:
        raise Unauthenticated("missing or invalid API key; send 'Authorization: Bearer tml-...'")
    async with request.state.database.read() as unit:
        return await authenticate(unit, request.state.keyring, text, at=request.state.clock.now())
