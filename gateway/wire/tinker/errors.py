"""This dialect's one table: ``Kind`` to status and category, and the body of every refusal.

The client repeats 408, 409, 429 and 5xx for minutes, so what will not change is answered by another status.
"""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from gateway.core.errors import GatewayError, Kind
from gateway.core.results import Failure
from gateway.wire import failures
from gateway.wire.bodies import BodyTooLarge
from gateway.wire.turns import consume

TABLE: Mapping[Kind, tuple[int, str]] = {
    Kind.INVALID: (400, "user"),
    Kind.UNAUTHENTICATED: (401, "user"),
    Kind.FORBIDDEN: (403, "user"),
    Kind.NOT_FOUND: (404, "user"),
    Kind.CONFLICT: (400, "user"),
    Kind.EXHAUSTED: (429, "user"),
    Kind.OUT_OF_BUDGET: (402, "user"),  # the client waits as long as ``ClientConfig`` says
    Kind.INTERNAL: (500, "server"),
    Kind.UNAVAILABLE: (503, "server"),
}


def install(app: FastAPI) -> None:
    """Make ``app`` answer every failure in this dialect's shape."""
    failures.install(app, render, refused=consume)


def render(request: Request, error: GatewayError, *, status: int | None = None) -> JSONResponse:
    """Return ``error`` as a response; ``status`` overrides the table."""
    status = status or (413 if isinstance(error, BodyTooLarge) else TABLE[error.kind][0])
    headers = {"Retry-After": failures.retry_after(error)} if status in (429, 503) else {}
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
