"""This dialect's one table: ``Kind`` to status and category, and the body of every refusal.

The client repeats 408, 409, 429 and 5xx for minutes, so what will not change is answered by another status.
"""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from gateway.core.errors import GatewayError, Internal, Kind
from gateway.core.results import Failure
from gateway.wire.bodies import BodyTooLarge, invalid_from
from gateway.wire.tinker.turns import consume

TABLE: Mapping[Kind, tuple[int, str]] = {
    Kind.INVALID: (400, "user"),
    Kind.UNAUTHENTICATED: (401, "user"),
    Kind.FORBIDDEN: (403, "user"),
    Kind.NOT_FOUND: (404, "user"),
    Kind.CONFLICT: (400, "user"),
    Kind.EXHAUSTED: (429, "user"),
    Kind.OUT_OF_BUDGET: (402, "user"),  # the client waits, and asks again for an hour
    Kind.INTERNAL: (500, "server"),
    Kind.UNAVAILABLE: (503, "server"),
}
RETRY_AFTER_S = 1


def install(app: FastAPI) -> None:
    """Make ``app`` answer every failure in this dialect's shape."""
    app.add_exception_handler(GatewayError, _gateway_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(Exception, _unplanned)


def render(request: Request, error: GatewayError, *, status: int | None = None) -> JSONResponse:
    """Return ``error`` as a response; ``status`` overrides the table."""
    status = status or (413 if isinstance(error, BodyTooLarge) else TABLE[error.kind][0])
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else {}
    body = {
        **failed(error),
        "detail": error.message,
        "request_id": getattr(request.state, "request_id", None),
    }
    return JSONResponse(body, status_code=status, headers=headers)


def failed(error: GatewayError | Failure) -> dict[str, Any]:
    """Return the body that tells of a failed future, in an answer with status 200."""
    return {
        "error": error.message,
        "category": TABLE[error.kind][1],
        "code": error.code,
        "field": error.field,
        "details": dict(error.details),
    }


async def _gateway_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, GatewayError)
    await consume(request, error)
    return render(request, error)


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    await consume(request, error)
    return render(request, invalid_from(error.errors()))


async def _http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    match error.status_code:
        case 404:
            kind, code, message = Kind.NOT_FOUND, "unknown_path", "no such path"
        case 405:
            kind, code, message = Kind.INVALID, "method_not_allowed", f"{request.method} is not allowed here"
        case _:
            kind, code, message = Kind.INVALID, "invalid_request", str(error.detail)
    plain = GatewayError(message, code=code)
    plain.kind = kind
    response = render(request, plain, status=error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _unplanned(request: Request, error: Exception) -> JSONResponse:
    request_id = getattr(request.state, "request_id", None)
    return render(request, Internal(f"something broke on our side; quote request id {request_id}"))
