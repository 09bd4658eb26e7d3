"""The registry of versions: reading them, judging them, and what is done to them after they were saved."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Protocol

from gateway.core.ids import KeyId, ProjectId, SessionId, VersionId
from gateway.core.results import Failure
from gateway.core.versions import (
    CanaryReport,
    Check,
    Group,
    Labels,
    Version,
    VersionEvent,
    VersionFilter,
    VersionKind,
)


class VersionStore(Protocol):
    """Model package groups and versions, deleted ones too. A stranger's version is NotFound, like a missing one."""

    async def get(self, project_id: ProjectId, version_id: VersionId) -> Version: ...

    async def by_address(self, project_id: ProjectId, group: str, number: int) -> Version: ...

    async def by_alias(self, project_id: ProjectId, group: str, alias: str) -> Version: ...

    async def newest(self, project_id: ProjectId, group: str, kind: VersionKind | None) -> Version:
        """Return the highest number that can be used: neither rejected nor deleted, an adapter also published."""
        ...

    async def by_name(self, session_id: SessionId, kind: VersionKind, name: str) -> Version | None: ...

    async def page(
        self, project_id: ProjectId, wanted: VersionFilter, *, limit: int, after: VersionId | None, offset: int = 0
    ) -> Sequence[Version]:
        """Newest first, after the version ``after`` or after so many."""
        ...

    async def count(self, project_id: ProjectId, wanted: VersionFilter) -> int: ...

    async def groups(self, project_id: ProjectId) -> Sequence[Group]: ...

    async def add_group(
        self, project_id: ProjectId, name: str, *, description: str, user_metadata: Mapping[str, str], at: datetime
    ) -> bool:
        """Make an empty group; False: there is one of that name, which stays as it is."""
        ...

    async def group(self, project_id: ProjectId, name: str) -> Group:
        """Raises NotFound."""
        ...

    async def awaiting_publication(self, limit: int) -> Sequence[Version]:
        """Staged adapters whose save_weights operation is still running, oldest first."""
        ...

    async def publish(self, version_id: VersionId, report: CanaryReport, *, at: datetime) -> None:
        """Mark published and, if it contains a later seq than the present one, make it its session's latest version.

        A running save_weights operation of this version completes in the same transaction.
        """
        ...

    async def reject(self, version_id: VersionId, failure: Failure, *, at: datetime) -> None:
        """Mark rejected; its running save_weights operation fails with ``failure``; latest stays."""
        ...


class Registry(Protocol):
    """What owners do to their versions. Everything leaves a line of history; doing it again changes nothing."""

    async def set_alias(
        self, project_id: ProjectId, version_id: VersionId, alias: str, *, by: KeyId, at: datetime
    ) -> Version:
        """Let ``alias`` name this version of its group, and no other from now on."""
        ...

    async def drop_alias(self, project_id: ProjectId, group: str, alias: str, *, by: KeyId, at: datetime) -> None: ...

    async def aliases_of(self, version_ids: Sequence[VersionId]) -> Mapping[VersionId, Sequence[str]]: ...

    async def edit(
        self, project_id: ProjectId, version_id: VersionId, labels: Labels, *, by: KeyId, at: datetime
    ) -> Version:
        """Replace the labels, but for the name. Another time to live counts from now."""
        ...

    async def delete(
        self, project_id: ProjectId, version_id: VersionId, *, force: bool, by: KeyId, at: datetime
    ) -> Version:
        """Let the version answer no new request. Its files stay until the time for undeleting is over.

        Raises:
            Conflict: ``version_aliased``; ``version_in_use`` by an operation; and, unless ``force``, ``version_in_use``
                as the latest of a live session or by a sampler that stays with it, of a client that lives; or
                ``only_copy``: nothing else is left of its ended session.
        """
        ...

    async def replace(self, project_id: ProjectId, version_id: VersionId, *, by: KeyId, at: datetime) -> None:
        """Delete the version and take its name away, so that another save may have it."""
        ...

    async def undelete(
        self, project_id: ProjectId, version_id: VersionId, *, window: timedelta, by: KeyId, at: datetime
    ) -> Version:
        """Bring back what was deleted or expired less than ``window`` ago. Raises Conflict ``undelete_window_over``."""
        ...

    async def history(
        self, project_id: ProjectId, group: str, *, limit: int, after: str | None = None
    ) -> Sequence[VersionEvent]:
        """Newest first, those before the event ``after``. Raises NotFound: the group has no such event."""
        ...


class Upkeep(Protocol):
    """What the gateway does to versions by itself, of all projects, and what the gate found."""

    async def expire_due(self, at: datetime) -> Sequence[VersionId]:
        """Record as deleted what expired by ``at``."""
        ...

    async def deleted_before(self, moment: datetime, *, limit: int) -> Sequence[Version]:
        """Return what was deleted by ``moment`` and still has files, oldest first."""
        ...

    async def used(self, version_ids: Sequence[VersionId], *, until: datetime) -> None:
        """Record that a gateway still works with deleted versions: their files must stay until then."""
        ...

    async def is_used(self, version_id: VersionId, *, at: datetime) -> bool:
        """Whether a gateway works with the version, or a load reads it: one to come, or one that a replay repeats."""
        ...

    async def purged(self, version_id: VersionId, *, at: datetime) -> None:
        """Record that the files are gone."""
        ...

    async def record_check(self, check: Check) -> None:
        """Keep the gate's last verdict about a version on an engine."""
        ...

    async def checks(self, version_ids: Sequence[VersionId]) -> Mapping[VersionId, Sequence[Check]]: ...
