"""This dialect's one table: ``Kind`` to status and type, and OpenAI's error body.

A clash with what is recorded is 400 here, not 409: OpenAI's clients repeat a 409.
"""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from gateway.core.errors import GatewayError, Internal, Kind
from gateway.wire.bodies import BodyTooLarge, invalid_from

TABLE: Mapping[Kind, tuple[int, str]] = {
    Kind.INVALID: (400, "invalid_request_error"),
    Kind.UNAUTHENTICATED: (401, "invalid_request_error"),
    Kind.FORBIDDEN: (403, "permission_error"),
    Kind.NOT_FOUND: (404, "invalid_request_error"),
    Kind.CONFLICT: (400, "invalid_request_error"),
    Kind.EXHAUSTED: (429, "rate_limit_error"),
    Kind.OUT_OF_BUDGET: (429, "insufficient_quota"),
    Kind.INTERNAL: (500, "server_error"),
    Kind.UNAVAILABLE: (503, "server_error"),
}
RETRY_AFTER_S = 1


def install(app: FastAPI) -> None:
    """Make ``app`` answer every failure in this dialect's shape."""
    app.add_exception_handler(GatewayError, _gateway_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(Exception, _unplanned)


def error_body(error: GatewayError) -> Mapping[str, Any]:
    return _body(error.message, TABLE[error.kind][1], error.field, error.code)


def _body(message: str, kind: str, param: str | None, code: str | None) -> Mapping[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _render(error: GatewayError) -> JSONResponse:
    status = 413 if isinstance(error, BodyTooLarge) else TABLE[error.kind][0]
    headers: dict[str, str] = {}
    if error.kind is Kind.OUT_OF_BUDGET:
        headers["X-Should-Retry"] = "false"  # the clients would repeat a 429 for minutes
    elif status in (429, 503):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status_code=status, headers=headers)


async def _gateway_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, GatewayError)
    return _render(error)


async def _validation_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return _render(invalid_from(error.errors()))


async def _http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    match error.status_code:
        case 404:
            message, code = "no such path", "unknown_url"
        case 405:
            message, code = f"{request.method} is not allowed here", "method_not_allowed"
        case _:
            message, code = str(error.detail), "invalid_request"
    body = _body(message, "invalid_request_error", None, code)
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _unplanned(request: Request, error: Exception) -> JSONResponse:
    request_id = getattr(request.state, "request_id", None)
    return _render(Internal(f"something broke on our side; quote request id {request_id}"))
