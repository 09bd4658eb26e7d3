"""The route class of every dialect: first who is calling, then their rates, then the body, then the handler.

A stranger's body is never read, and a body that is not strict JSON never reaches a schema.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.datastructures import Headers

from gateway.auth.keys import authenticate
from gateway.core.errors import GatewayError, Unauthenticated
from gateway.core.limits import Limit
from gateway.core.principals import Principal
from gateway.wire.bodies import BodyTooLarge, StrictRequest
from gateway.wire.deps import Needs


class DialectRoute(APIRoute):
    """A route behind a bearer key, with a strict JSON body."""

    media_types: frozenset[str] | None = frozenset({"application/json"})
    reads_body: bool = True  # False: the handler streams it
    hears_excess: bool = False  # True: ``too_large`` wants to know what was refused for its size

    @staticmethod
    def presented_key(headers: Headers) -> str | None:
        """Return the key that a request shows."""
        scheme, _, text = headers.get("authorization", "").partition(" ")
        return text.strip() if scheme.lower() == "bearer" else None

    async def identify(self, request: Request) -> Principal:
        """Return who is calling, before anything of the body is read.

        Raises:
            Unauthenticated: nobody we know.
        """
        return await _authenticate(request, self.presented_key(request.headers))

    async def verify(self, request: StrictRequest) -> None:
        """Check what only the whole request can show of its sender.

        Raises:
            Unauthenticated: it comes from somebody else.
        """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        works = self.methods != {"GET"} and _needs_a_scope(self.dependant)

        async def guarded(request: Request) -> Response:
            request.state.principal = await self.identify(request)
            most = await _admit(request, works=works)
            strict = StrictRequest(
                request.scope,
                request.receive,
                max_bytes=most,
                media_types=self.media_types,
                max_drained=2 * request.state.max_body_bytes if self.hears_excess else None,
            )
            if self.reads_body and strict.method not in ("GET", "HEAD", "OPTIONS"):
                try:
                    await strict.load()
                except BodyTooLarge:
                    await self.too_large(strict)
                    raise
            await self.verify(strict)
            try:
                return await handle(strict)
            except (GatewayError, RequestValidationError) as error:
                await self.refused(strict, error)
                raise

        return guarded

    async def too_large(self, request: StrictRequest) -> None:
        """Hear of a body that was refused for its size, before that is answered.

        Raises:
            Unauthenticated: it comes from somebody else.
        """

    async def refused(self, request: StrictRequest, error: GatewayError | RequestValidationError) -> None:
        """Hear of a refusal before it is answered; what the handler wrote is rolled back after this."""


def _needs_a_scope(dependant: Dependant) -> bool:
    if isinstance(dependant.call, Needs):
        return bool(dependant.call.scopes)
    return any(_needs_a_scope(inner) for inner in dependant.dependencies)


async def _admit(request: Request, *, works: bool) -> int:
    """Count a request that works or changes something; return how many bytes its body may have.

    Raises:
        RateLimited: the project or the key has used up a rate.
    """
    limiter, principal = request.state.limiter, request.state.principal
    if works:
        request.state.allowance, request.state.headers = await limiter.admit(principal)
    else:
        request.state.allowance = await limiter.allowance(principal)
    return min(
        request.state.max_body_bytes, request.state.allowance.limits.get(Limit.BODY, request.state.max_body_bytes)
    )


async def _authenticate(request: Request, text: str | None) -> Principal:
    if not text:
        raise Unauthenticated("missing or invalid API key; send 'Authorization: Bearer tml-...'")
    return await authenticate(request.state.keys, request.state.keyring, text, at=request.state.clock.now())
