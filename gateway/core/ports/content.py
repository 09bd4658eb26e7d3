"""Where content lies: blobs (payloads, results, answers) and artefacts (directories of saved weights)."""

from pathlib import Path
from typing import Protocol

from gateway.core.bodies import Body
from gateway.core.ids import ProjectId
from gateway.core.manifest import Manifest
from gateway.core.payloads import Payload


class BlobStore(Protocol):
    """Tenant content by (project, sha256). Small blobs live in the database, larger ones in files, fsynced first."""

    async def put(self, project_id: ProjectId, content: bytes) -> str:
        """Store ``content`` and return its digest; storing it again is free. For what accepted work comes to."""
        ...

    async def accept(self, project_id: ProjectId, content: bytes) -> str:
        """As ``put``, for new work; what is stored already is taken again in any case.

        Raises:
            Unavailable: ``disk_full``, only the disk's reserve is left.
        """
        ...

    async def get(self, project_id: ProjectId, digest: str) -> bytes:
        """Raises NotFound when there is no such blob in the project."""
        ...

    async def add(self, project_id: ProjectId, body: Body) -> None:
        """Store a body; ``Database.prepare`` has written the file of a large one."""
        ...

    async def get_payload(self, project_id: ProjectId, digest: str) -> Payload: ...


class CorruptArtifact(Exception):
    """A stored artefact is not what its manifest says."""


class Artifacts(Protocol):
    """Directories of saved versions and snapshots, under names the store makes. The methods block.

    ``url`` is below which every location lies in an object store; None: in a directory of this machine.
    """

    @property
    def url(self) -> str | None: ...

    def path(self, location: str) -> Path:
        """Return the local directory, which is there once it was fetched or verified."""
        ...

    def fetch(self, location: str, manifest_sha256: str | None) -> Manifest:
        """Bring the files here, if they are not, and return the manifest, whose own hash alone is checked.

        None: no hash of it was recorded.

        Raises:
            CorruptArtifact: there is no such manifest.
            Unavailable: the store is away.
        """
        ...

    def verify(self, location: str, manifest_sha256: str | None) -> Manifest:
        """As ``fetch``, and re-hash every file.

        Raises:
            CorruptArtifact: something is missing or differs.
            Unavailable: the store is away.
        """
        ...

    def stage(self, location: str, *, size_bytes: int = 0) -> Path:
        """Return a new empty directory to write ``location`` in, whose name is the location.

        Raises:
            FileExistsError: the location is committed already.
            OSError: ENOSPC, the disk is so full that ``size_bytes`` more would use its reserve.
        """
        ...

    def commit(self, temporary: Path, manifest: Manifest) -> str:
        """Make a staged directory final and durable; return the sha256 of its manifest.

        Raises:
            ValueError: the staged files are not those of ``manifest``.
            FileExistsError: the location was committed meanwhile.
            OSError: the store does not take it.
        """
        ...

    def discard(self, temporary: Path) -> None:
        """Remove a staged directory that will not be committed; one that was is left alone."""
        ...

    def remove(self, location: str) -> None:
        """Delete the files; those that are gone already are fine. Nobody may still read them."""
        ...
