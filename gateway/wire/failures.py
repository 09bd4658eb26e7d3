"""What every dialect does with a failure; how it looks is the dialect's ``Render``."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from gateway.core.errors import GatewayError, Internal, Kind
from gateway.wire.bodies import invalid_from

RETRY_AFTER_S = 1


def retry_after(error: GatewayError) -> str:
    """Return when to come back, in whole seconds: when the rate allows it, else soon."""
    return str(error.details.get("retry_after_s", RETRY_AFTER_S))


Notice = Callable[[Request, Exception], Awaitable[None]]


class Render(Protocol):
    """Makes a failure a response in one dialect's shape; ``status`` overrides the dialect's table."""

    def __call__(self, request: Request, error: GatewayError, *, status: int | None = None) -> Response: ...


async def _unnoticed(_: Request, __: Exception) -> None:
    """For dialects that need not know of a refusal."""


def install(app: FastAPI, render: Render, *, unknown_path: str = "unknown_path", refused: Notice = _unnoticed) -> None:
    """Make ``app`` answer every failure by ``render``. ``unknown_path`` is the dialect's code for a path that is not
    there; ``refused`` hears of every refusal of a request before it is answered."""

    async def gateway_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, GatewayError)
        await refused(request, error)
        return render(request, error)

    async def validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        await refused(request, error)
        return render(request, invalid_from(error.errors()))

    async def http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = render(request, _planned(request, error, unknown_path), status=error.status_code)
        response.headers.update(error.headers or {})
        return response

    async def unplanned(request: Request, error: Exception) -> Response:
        request_id = getattr(request.state, "request_id", None)
        return render(request, Internal(f"something broke on our side; quote request id {request_id}"))

    app.add_exception_handler(GatewayError, gateway_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(HTTPException, http_exception)
    app.add_exception_handler(Exception, unplanned)


def _planned(request: Request, error: HTTPException, unknown_path: str) -> GatewayError:
    match error.status_code:
        case 404:
            kind, code, message = Kind.NOT_FOUND, unknown_path, "no such path"
        case 405:
            kind, code, message = Kind.INVALID, "method_not_allowed", f"{request.method} is not allowed here"
        case _:
            kind, code, message = Kind.INVALID, "invalid_request", str(error.detail)
    plain = GatewayError(message, code=code)
    plain.kind = kind
    return plain
