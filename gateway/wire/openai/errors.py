"""This dialect's one table: ``Kind`` to status and type, and OpenAI's error body.

A clash with what is recorded is 400 here, not 409: OpenAI's clients repeat a 409.
"""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from gateway.core.errors import GatewayError, Kind
from gateway.wire import failures
from gateway.wire.bodies import BodyTooLarge

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


def install(app: FastAPI) -> None:
    """Make ``app`` answer every failure in this dialect's shape."""
    failures.install(app, _render, unknown_path="unknown_url")


def error_body(error: GatewayError) -> Mapping[str, Any]:
    kind = TABLE[error.kind][1]
    return {"error": {"message": error.message, "type": kind, "param": error.field, "code": error.code}}


def _render(request: Request, error: GatewayError, *, status: int | None = None) -> JSONResponse:
    status = status or (413 if isinstance(error, BodyTooLarge) else TABLE[error.kind][0])
    headers: dict[str, str] = {}
    if error.kind is Kind.OUT_OF_BUDGET:
        headers["X-Should-Retry"] = "false"  # the clients would repeat a 429 for minutes
    elif status in (429, 503):
        headers["Retry-After"] = failures.retry_after(error)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status_code=status, headers=headers)
