"""What may be thrown away."""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Protocol

from gateway.core.ids import ProjectId

BlobName = tuple[ProjectId, str]  # project and digest


class CollectionStore(Protocol):
    """Finds what nobody needs any more: bodies behind a snapshot, results after their day, state of ended sessions."""

    async def unneeded(
        self, *, after: BlobName | None, limit: int, at: datetime
    ) -> tuple[Sequence[BlobName], BlobName | None]:
        """Look at the next ``limit`` blobs; return those that nobody needs, and where to go on (None: seen all)."""
        ...

    async def remove(self, names: Collection[BlobName], *, at: datetime) -> int:
        """Delete those of ``names`` that are still unneeded; return how many."""
        ...

    async def forget_snapshots(self, limit: int) -> Sequence[str]:
        """Take the snapshots of ended sessions out of the record; return their locations, to be removed."""
        ...

    async def known(self, locations: Collection[str]) -> Collection[str]:
        """Return those of ``locations`` that belong to a version not purged, or are a session's snapshot."""
        ...

    async def forget_answers(self, at: datetime) -> int:
        """Delete the answers to idempotency keys after their day."""
        ...
