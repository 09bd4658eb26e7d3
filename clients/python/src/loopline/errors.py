"""What can go wrong, by who is at fault.

LooplineError
├── ConnectionFailed      no answer after every retry (also a ConnectionError); the work may or may not have arrived
├── ApiError              the gateway refused the request: nothing was recorded, nothing changed
│   ├── InvalidRequest    the request is wrong and will stay wrong (also a ValueError)
│   ├── Unauthenticated   no key, or not a valid one
│   ├── Forbidden         a valid key without the right
│   ├── NotFound          no such thing, or not yours
│   ├── Conflict          clashes with what is already recorded
│   ├── OutOfBudget       a budget does not cover the worst case; nothing ran, and nothing will until it is raised
│   ├── Exhausted         a quota or queue is full, still after every retry
│   ├── Unavailable       something is away, still after every retry
│   └── ServerFault       the gateway's own fault
├── OperationError        an accepted operation failed; weights, moments and accumulated gradient are as before it
├── IncompleteGradient    an optim_step was held back: a forward_backward before it never reached the session
├── ResultMismatchError   the answer does not fit the question (a client and a gateway of different versions)
└── ClientStopped         this client was stopped or closed (also a RuntimeError)

A wait that runs out raises the builtin TimeoutError, a wrong argument the builtin ValueError or TypeError at call time.
Every error pickles, with all its attributes. To add a branch: subclass, set the attributes in ``__init__``, and keep
``__init__`` callable with the keyword arguments that ``_state`` returns.
"""

from collections.abc import Mapping
from typing import Any

Details = Mapping[str, str | int | float]

_RETRYABLE_KINDS = frozenset({"exhausted", "unavailable"})


class LooplineError(Exception):
    """Root of everything this package raises on its own account."""

    def __init__(self, message: str) -> None:
        self.message = message
        super().__init__(message)

    @property
    def is_retryable(self) -> bool:
        """Whether the same call may succeed later, unchanged."""
        return False

    def _state(self) -> dict[str, Any]:
        return {"message": self.message}

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self._state()))


def _rebuild(cls: type[LooplineError], state: dict[str, Any]) -> LooplineError:
    return cls(**state)


def is_retryable(error: BaseException) -> bool:
    """Return whether the call that raised ``error`` may succeed later, unchanged."""
    return isinstance(error, LooplineError) and error.is_retryable


class ConnectionFailed(LooplineError, ConnectionError):
    """No answer came, retries included. ``during`` names the call."""

    def __init__(self, message: str, during: str = "") -> None:
        self.during = during
        super().__init__(message)

    @property
    def is_retryable(self) -> bool:
        return True

    def _state(self) -> dict[str, Any]:
        return {"message": self.message, "during": self.during}


class ApiError(LooplineError):
    """The gateway answered with an error.

    ``status`` is the HTTP status, ``code`` and ``kind`` the gateway's machine-readable reason, ``field`` the dotted
    path of the offending input, ``details`` small facts (datum, position, limit), ``during`` the call, and
    ``request_id`` finds the request in the gateway's log.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str,
        kind: str,
        field: str | None = None,
        details: Details | None = None,
        request_id: str | None = None,
        during: str = "",
    ) -> None:
        self.status = status
        self.code = code
        self.kind = kind
        self.field = field
        self.details = dict(details or {})
        self.request_id = request_id
        self.during = during
        super().__init__(message)

    def __str__(self) -> str:
        where = f"{self.during}: " if self.during else ""
        request = f", request {self.request_id}" if self.request_id else ""
        return f"{where}{self.message} ({self.status} {self.code}{request})"

    @property
    def is_retryable(self) -> bool:
        return self.kind in _RETRYABLE_KINDS

    def _state(self) -> dict[str, Any]:
        return {
            "message": self.message,
            "status": self.status,
            "code": self.code,
            "kind": self.kind,
            "field": self.field,
            "details": self.details,
            "request_id": self.request_id,
            "during": self.during,
        }


class InvalidRequest(ApiError, ValueError):
    """The request is wrong; ``field`` says where."""


class Unauthenticated(ApiError):
    """No key, or not a valid one."""


class Forbidden(ApiError):
    """The key is valid, the right is missing."""


class NotFound(ApiError):
    """No such thing, or not yours: the two are indistinguishable."""


class Conflict(ApiError):
    """The request clashes with what is recorded, for example a stopped session."""


class OutOfBudget(ApiError):
    """A budget does not cover what the call can cost; ``details`` has the numbers in nano-USD."""


class Exhausted(ApiError):
    """A quota or queue is full."""


class Unavailable(ApiError):
    """Something the request needs is away."""


class ServerFault(ApiError):
    """The gateway's own fault."""

    @property
    def is_retryable(self) -> bool:
        return True


_BY_STATUS: Mapping[int, type[ApiError]] = {
    400: InvalidRequest,
    401: Unauthenticated,
    402: OutOfBudget,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    413: InvalidRequest,
    422: InvalidRequest,
    429: Exhausted,
    503: Unavailable,
}


def api_error_class(status: int) -> type[ApiError]:
    """Return the branch of the tree for an HTTP status."""
    return _BY_STATUS.get(status, ServerFault if status >= 500 else ApiError)


class OperationError(LooplineError):
    """An accepted operation failed, was skipped or was cancelled.

    ``operation_type`` is its kind (``optim_step``), ``operation_id`` and ``seq`` name it, ``session_id`` its session;
    ``code``, ``kind``, ``field`` and ``details`` say why.
    """

    def __init__(
        self,
        message: str,
        *,
        operation_type: str,
        operation_id: str,
        session_id: str,
        seq: int,
        code: str,
        kind: str,
        field: str | None = None,
        details: Details | None = None,
    ) -> None:
        self.operation_type = operation_type
        self.operation_id = operation_id
        self.session_id = session_id
        self.seq = seq
        self.code = code
        self.kind = kind
        self.field = field
        self.details = dict(details or {})
        super().__init__(message)

    def __str__(self) -> str:
        name = f"{self.operation_type} {self.operation_id} (seq {self.seq} of {self.session_id})"
        return f"{name} failed: {self.message} ({self.code})"

    @property
    def is_retryable(self) -> bool:
        return self.kind in _RETRYABLE_KINDS

    def _state(self) -> dict[str, Any]:
        return {
            "message": self.message,
            "operation_type": self.operation_type,
            "operation_id": self.operation_id,
            "session_id": self.session_id,
            "seq": self.seq,
            "code": self.code,
            "kind": self.kind,
            "field": self.field,
            "details": self.details,
        }


class IncompleteGradient(LooplineError):
    """An ``optim_step`` called before a ``forward_backward`` was known to be refused; it was not sent."""


class ResultMismatchError(LooplineError):
    """The gateway's answer does not have the expected form."""


class ClientStopped(LooplineError, RuntimeError):
    """The client no longer accepts calls."""
