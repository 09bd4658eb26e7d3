"""This dialect's one table: ``Kind`` to status, and the body of every refusal."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from gateway.core.errors import GatewayError, Kind
from gateway.wire import failures
from gateway.wire.bodies import BodyTooLarge

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


def install(app: FastAPI) -> None:
    """Make ``app`` answer every failure in this dialect's shape."""
    failures.install(app, render)


def render(request: Request, error: GatewayError, *, status: int | None = None) -> JSONResponse:
    """Return ``error`` as a response; ``status`` overrides the table."""
    status = status or (413 if isinstance(error, BodyTooLarge) else STATUS[error.kind])
    headers: dict[str, str] = {}
    if status in (429, 503):
        headers["Retry-After"] = failures.retry_after(error)
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
