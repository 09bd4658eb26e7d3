"""Signed links to the files of a version: whoever holds one may fetch that file until it expires, without a key.

A link names project, version, file and moment; the signature derives from the master key. The name ``archive.tar``
stands for all files in one archive. States stay here: they hold what only this trainer can read.
"""

import asyncio
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from fastapi import APIRouter, Request, Response

from gateway.auth.keys import Keyring
from gateway.core.errors import Conflict, Internal, NotFound
from gateway.core.ids import ProjectId, VersionId
from gateway.core.manifest import FileEntry, Manifest
from gateway.core.ports import Artifacts, CorruptArtifact
from gateway.core.tarballs import Content, FilePart, tarball
from gateway.core.versions import Version, VersionKind, VersionState
from gateway.wire.deps import ArtifactsDep, ClockDep, DatabaseDep
from gateway.wire.ranges import content_response

LINK_TTL = timedelta(hours=1)
ARCHIVE = "archive.tar"

router = APIRouter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Paths with queries, below the router's own, by file name; ``archive_bytes`` is the size of the archive."""

    files: Mapping[str, FileEntry]
    paths: Mapping[str, str]
    archive_bytes: int
    expires_at: datetime


async def links_to(version: Version, artifacts: Artifacts, keyring: Keyring, *, at: datetime) -> Links:
    """Return links to the files of ``version``, which are verified first, and to their archive.

    Raises:
        NotFound: it was deleted or has expired.
        Conflict: ``version_not_exportable``: a state, or rejected by the gate.
        Internal: ``corrupt_artifact``.
    """
    version.require_present(at)
    if version.kind is VersionKind.STATE or version.state is VersionState.REJECTED:
        what = "rejected" if version.state is VersionState.REJECTED else "a state"
        raise Conflict(f"{version.address} is {what}; it cannot be exported", code="version_not_exportable")
    try:
        manifest = await asyncio.to_thread(artifacts.verify, version.location, version.manifest_sha256)
    except CorruptArtifact as error:
        raise Internal(f"{version.address} cannot be read", code="corrupt_artifact") from error
    expires = int((at + LINK_TTL).timestamp())
    return Links(
        files=manifest.files,
        paths={name: _path(keyring, version, name, expires) for name in (*manifest.files, ARCHIVE)},
        archive_bytes=_content(version, artifacts, manifest, ARCHIVE).size_bytes,
        expires_at=datetime.fromtimestamp(expires, at.tzinfo),
    )


def mounted_at(request: Request) -> str:
    """Return the URL of the dialect that ``request`` came to, as its client wrote it."""
    return f"{request.url.scheme}://{request.url.netloc}{request.scope['root_path']}"


def _path(keyring: Keyring, version: Version, name: str, expires: int) -> str:
    place = f"{version.project_id}/{version.id}/{name}"
    return f"/downloads/{place}?expires={expires}&signature={keyring.signature(f'{place}?{expires}')}"


@router.get("/downloads/{project_id}/{version_id}/{file:path}")
@router.head("/downloads/{project_id}/{version_id}/{file:path}", include_in_schema=False)
async def download(
    project_id: str,
    version_id: str,
    file: str,
    expires: int,
    signature: str,
    request: Request,
    clock: ClockDep,
    artifacts: ArtifactsDep,
    database: DatabaseDep,
) -> Response:
    """Send what a link names, or any range of it."""
    keyring: Keyring = request.state.keyring
    signed = keyring.signature(f"{project_id}/{version_id}/{file}?{expires}")
    if not hmac.compare_digest(signed.encode(), signature.encode()) or expires <= clock.now().timestamp():
        raise NotFound("no such link, or it has expired", code="unknown_link")
    async with database.read() as unit:
        version = await unit.versions.get(ProjectId(project_id), VersionId(version_id))
    version.require_present(clock.now())
    try:
        manifest = await asyncio.to_thread(artifacts.fetch, version.location, version.manifest_sha256)
        content = _content(version, artifacts, manifest, file)
    except (CorruptArtifact, KeyError) as error:
        raise NotFound("the file that this link names is gone", code="unknown_link") from error
    entry = manifest.files.get(file)
    return content_response(
        request,
        content,
        tag=f"{version.manifest_sha256[:32]}-tar" if entry is None else entry.sha256,
        filename=f"{version.group}-{version.number}.tar" if entry is None else file.rpartition("/")[2],
        media_type="application/x-tar" if entry is None else "application/octet-stream",
    )


def _content(version: Version, artifacts: Artifacts, manifest: Manifest, file: str) -> Content:
    """Raises KeyError: the version has no such file."""
    directory = artifacts.path(version.location)
    parts = {name: FilePart(directory / name, entry.size_bytes) for name, entry in sorted(manifest.files.items())}
    return tarball(list(parts.items())) if file == ARCHIVE else Content([parts[file]])
