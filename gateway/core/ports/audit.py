"""The audit log of one transaction."""

from collections.abc import Sequence
from typing import Protocol

from gateway.core.audit import AuditEntry
from gateway.core.ids import KeyId, ProjectId


class AuditStore(Protocol):
    """Entries are added, never changed: the database refuses it."""

    async def add(
        self,
        project_id: ProjectId,
        *,
        actor: KeyId | None,
        action: str,
        subject: str,
        request_id: str | None = None,
    ) -> None: ...

    async def page(self, project_id: ProjectId | None, *, limit: int, after: str | None) -> Sequence[AuditEntry]:
        """Newest first, after the entry ``after``; None for every project's. Raises Invalid: ``after`` is no text."""
        ...
