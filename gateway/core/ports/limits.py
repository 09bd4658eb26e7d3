"""The limits of one transaction."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.core.ids import KeyId, ProjectId
from gateway.core.limits import Allowance, Limit, LimitScope


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLimit:
    """A value that replaces the default, of one project or key."""

    scope: LimitScope
    scope_id: str
    project_id: ProjectId
    limit: Limit
    value: int


class LimitStore(Protocol):
    """Limits, the buckets of rates, and the counts that quotas are held against."""

    async def allowance(self, project_id: ProjectId, key_id: KeyId) -> Allowance: ...

    async def take(self, project_id: ProjectId, key_id: KeyId, limit: Limit, amount: int) -> tuple[int, Allowance]:
        """Take up to ``amount`` from the caller's buckets of a rate; return how much, and what is left."""
        ...

    async def reserve(self, project_id: ProjectId, key_id: KeyId, tokens: int) -> None:
        """Take ``tokens`` that are about to be consumed at most; those that are not, ``charge`` gives back.

        Raises:
            RateLimited: the project or the key has fewer left. More than a whole minute's take a full bucket.
        """
        ...

    async def charge(self, project_id: ProjectId, key_id: KeyId, tokens: int) -> None:
        """Take ``tokens`` that were consumed, also where that is more than is left; below 0, give back."""
        ...

    async def require_room(self, project_id: ProjectId, key_id: KeyId, limit: Limit, *, more: int = 1) -> None:
        """Raise unless ``more`` sessions, queued operations, versions or bytes fit.

        Raises:
            QuotaFull: the project or the key has as many as it may.
        """
        ...

    async def own(self, project_id: ProjectId | None = None) -> Sequence[OwnLimit]:
        """Return what replaces the defaults, of one project and its keys or of all."""
        ...

    async def set(self, own: OwnLimit) -> None: ...

    async def remove(self, scope: LimitScope, scope_id: str, limit: Limit) -> bool: ...
