"""This dialect's one table: ``Kind`` to status, and the body of every refusal."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from gateway.core.errors import GatewayError, Internal, Kind
from gateway.wire.bodies import BodyTooLarge, invalid_from

STATUS: Mapping[Kind, int] = {
    Kind.INVALID: 400,
    Kind.UNAUTHENTICATED: 401,
    Kind.FORBIDDEN: 403,
    Kind.NOT_FOUND: 404,
    Kind.CONFLICT: 409,
    Kind.EXHAUSTED: 429,
    Kind.OUT_OF_BUDGET: 402,
    Kind.INTERNAL: 500,
    Kind.UNAVAILABLE: 503,
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
    status = status or (413 if isinstance(error, BodyTooLarge) else STATUS[error.kind])
    headers: dict[str, str] = {}
    if status in (429, 503):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(_body(request, error), status_code=status, headers=headers)


def _body(request: Request, error: GatewayError) -> Mapping[str, Any]:
    return {
        "error": {
            "code": error.code,
            "message": error.message,
            "kind": error.kind.value,
            "field": error.field,
            "details": error.details,
            "request_id": getattr(request.state, "request_id", None),
        }
    }


async def _gateway_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, GatewayError)
    return render(request, error)


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
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
