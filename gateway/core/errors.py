"""Why the core refuses. It knows kinds, never status codes; each dialect owns one table.

GatewayError
├── Invalid             the caller must change the request (names field, datum, position, limit)
├── Unauthenticated     no key, or not a valid one
├── Forbidden           a valid key without the right
├── NotFound            no such thing, or not yours: the two are indistinguishable
├── Conflict            clashes with what is already recorded
│   └── SequenceReused  a sequence number came back with other content
├── Exhausted           a quota or queue is full
├── (OutOfBudget)       money is spent; see ``ledger.py``
├── Unavailable         something is away; the same request may work later
└── Internal            ours to mend
"""

from collections.abc import Mapping
from enum import StrEnum


class Kind(StrEnum):
    """Why the core refused, in words every dialect can translate."""

    INVALID = "invalid"  # the caller must change the request
    UNAUTHENTICATED = "unauthenticated"  # who are you?
    FORBIDDEN = "forbidden"  # known, but not allowed
    NOT_FOUND = "not_found"  # no such thing, or not yours
    CONFLICT = "conflict"  # clashes with what is already recorded
    EXHAUSTED = "exhausted"  # a quota or queue is full
    OUT_OF_BUDGET = "out_of_budget"  # money is spent: nothing runs until the budget is raised
    UNAVAILABLE = "unavailable"  # an engine is away; the same request may work later
    INTERNAL = "internal"  # ours to mend


class GatewayError(Exception):
    """Root of every refusal.

    ``code`` is stable and machine readable, ``field`` the path of the offending input
    (``data[3].loss_fn_inputs.weights``) and ``details`` small JSON facts (index, limit, the two numbers of a mismatch).
    """

    kind: Kind = Kind.INTERNAL
    default_code = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        field: str | None = None,
        details: Mapping[str, str | int | float] | None = None,
    ) -> None:
        self.message = message
        self.code = code or self.default_code
        self.field = field
        self.details = dict(details or {})
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.code, self.field, self.details))


def _rebuild(
    cls: type[GatewayError], message: str, code: str, field: str | None, details: Mapping[str, str | int | float]
) -> GatewayError:
    error = cls.__new__(cls)
    GatewayError.__init__(error, message, code=code, field=field, details=details)
    return error


class Invalid(GatewayError):
    """The request is wrong and will stay wrong."""

    kind = Kind.INVALID
    default_code = "invalid_request"


class Unauthenticated(GatewayError):
    """No key, or not a valid one."""

    kind = Kind.UNAUTHENTICATED
    default_code = "invalid_api_key"


class Forbidden(GatewayError):
    """The key is valid, the right is missing."""

    kind = Kind.FORBIDDEN
    default_code = "forbidden"


class NotFound(GatewayError):
    """No such thing, or not yours."""

    kind = Kind.NOT_FOUND
    default_code = "not_found"


class Conflict(GatewayError):
    """The request clashes with what is already recorded; repeating it will not help."""

    kind = Kind.CONFLICT
    default_code = "conflict"


class Exhausted(GatewayError):
    """A quota or a queue is full."""

    kind = Kind.EXHAUSTED
    default_code = "exhausted"


class Unavailable(GatewayError):
    """Something is away for a moment; the same request may work later."""

    kind = Kind.UNAVAILABLE
    default_code = "unavailable"


class Internal(GatewayError):
    """Something of ours broke; the message says no more than that."""

    kind = Kind.INTERNAL


class SequenceReused(Conflict):
    """A sequence number came back carrying other content."""

    def __init__(self, session_id: str, seq: int) -> None:
        super().__init__(
            f"operation {seq} of {session_id} was already submitted with other content",
            code="sequence_reused",
            field="seq",
        )
