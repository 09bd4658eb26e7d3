"""The audit log."""

from datetime import datetime

from gateway.wire.native.schemas.base import Read


class AuditRead(Read):
    """One change. ``actor`` is the id of the key, null for an operator at the command line; ``action`` the method and
    route, or the command; ``subject`` what it named; ``request_id`` that of the answer and of the log lines."""

    id: str
    at: datetime
    project_id: str
    actor: str | None
    action: str
    subject: str
    request_id: str | None


class AuditPage(Read):
    """Newest first; ``next`` is the ``after`` of the next page."""

    data: list[AuditRead]
    next: str | None
