"""This dialect's one table: ``Kind`` to a status and the two services' names for it.

The clients repeat 429 and 5xx for minutes, so what will not change is answered by 400, 403, 404 or 409. The control
plane has one status for all refusals, 400; its clients look at the name alone.
"""

from collections.abc import Mapping
from functools import partial

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from gateway.core.errors import GatewayError, Kind
from gateway.wire import failures
from gateway.wire.bodies import BodyTooLarge
from gateway.wire.turns import PERMANENT, consume

TABLE: Mapping[Kind, tuple[int, str, str]] = {  # status and name on the runtime, name on the control plane
    Kind.INVALID: (400, "ValidationException", "ValidationException"),
    Kind.UNAUTHENTICATED: (403, "UnrecognizedClientException", "UnrecognizedClientException"),
    Kind.FORBIDDEN: (403, "AccessDeniedException", "AccessDeniedException"),
    Kind.NOT_FOUND: (404, "ResourceNotFoundException", "ResourceNotFound"),
    Kind.CONFLICT: (400, "ValidationException", "ConflictException"),
    Kind.EXHAUSTED: (429, "ThrottlingException", "ThrottlingException"),
    Kind.OUT_OF_BUDGET: (400, "ValidationException", "ResourceLimitExceeded"),
    Kind.INTERNAL: (500, "InternalServerException", "InternalFailure"),
    Kind.UNAVAILABLE: (503, "InternalServerException", "ServiceUnavailable"),
}
_RUNTIME: Mapping[str, tuple[int, str]] = {  # by code, where the kind does not decide
    "session_not_running": (409, "ConflictException"),
}
_CONTROL: Mapping[str, str] = {
    "session_name_taken": "ResourceInUse",
    "group_exists": "ResourceInUse",
    "quota_exceeded": "ResourceLimitExceeded",
    "unknown_operation": "UnknownOperationException",
    "session_transition": "ValidationException",  # clients look for its message under this name
    "incomplete_signature": "IncompleteSignature",
    "clock_skew": "RequestTimeTooSkewed",
}
_PERMANENT = PERMANENT | {Kind.OUT_OF_BUDGET}  # its clients do not repeat that one


def install(app: FastAPI) -> None:
    """Make ``app`` answer every failure in this dialect's shape."""
    failures.install(app, render, refused=partial(consume, permanent=_PERMANENT))


def is_control(request: Request) -> bool:
    """Whether a request is for the control plane: all of it lies at the mount itself."""
    return request.url.path.rstrip("/") == request.scope.get("root_path", "").rstrip("/")


def render(request: Request, error: GatewayError, *, status: int | None = None) -> JSONResponse:
    """Return ``error`` as a response; ``status`` overrides the table."""
    by_kind, runtime_name, control_name = TABLE[error.kind]
    if is_control(request):
        name = _CONTROL.get(error.code, control_name)
        status = by_kind if by_kind >= 500 else 400
    else:
        by_kind, name = _RUNTIME.get(error.code, (by_kind, runtime_name))
        status = status or (413 if isinstance(error, BodyTooLarge) else by_kind)
    body = {
        "__type": name,
        "message": error.message,
        "reason": error.code,
        "field": error.field,
        "details": dict(error.details),
    }
    headers = {"x-amzn-errortype": name, "x-amzn-requestid": str(getattr(request.state, "request_id", ""))}
    if error.kind in (Kind.EXHAUSTED, Kind.UNAVAILABLE):
        headers["Retry-After"] = failures.retry_after(error)
    return JSONResponse(body, status_code=status, headers=headers)
