"""The audit log: one entry for every call that changed something, written in the transaction of the change."""

from dataclasses import dataclass
from datetime import datetime

from gateway.core.ids import KeyId, ProjectId

COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """Who did what, to what, when.

    ``actor`` is the key, None for an operator at the command line. ``action`` is the method and the route
    (``DELETE /training/v1/sessions/{session_id}``) or the command (``keys revoke``), ``subject`` what it named
    (``session_id=sess-...``). ``request_id`` is that of the answer and of the log lines; None at the command line.
    """

    id: str
    at: datetime
    project_id: ProjectId
    actor: KeyId | None
    action: str
    subject: str
    request_id: str | None
