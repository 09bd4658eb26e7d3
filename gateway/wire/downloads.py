"""Signed links to the files of an adapter: whoever holds one may fetch that file until it expires, without a key.

A link names project, version, file and moment; the signature derives from the master key. Only the two files of a PEFT
adapter can be linked to.
"""

import hmac
from datetime import datetime, timedelta

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse

from gateway.auth.keys import Keyring
from gateway.core.errors import NotFound
from gateway.core.ids import ProjectId, VersionId
from gateway.core.versions import Version, VersionKind
from gateway.wire.deps import ArtifactsDep, ClockDep, Reading

FILES = ("adapter_config.json", "adapter_model.safetensors")
LINK_TTL = timedelta(hours=1)

router = APIRouter()


def link(keyring: Keyring, version: Version, file: str, *, at: datetime) -> tuple[str, datetime]:
    """Return the path and query of a link to ``file``, and when it expires."""
    expires = int((at + LINK_TTL).timestamp())
    place = f"{version.project_id}/{version.id}/{file}"
    query = f"expires={expires}&signature={keyring.signature(f'{place}?{expires}')}"
    return f"/downloads/{place}?{query}", datetime.fromtimestamp(expires, at.tzinfo)


@router.get("/downloads/{project_id}/{version_id}/{file}")
async def download(
    project_id: str,
    version_id: str,
    file: str,
    expires: int,
    signature: str,
    request: Request,
    clock: ClockDep,
    artifacts: ArtifactsDep,
    unit: Reading,
) -> FileResponse:
    """Send a file that a link names, or any range of it."""
    keyring: Keyring = request.state.keyring
    signed = keyring.signature(f"{project_id}/{version_id}/{file}?{expires}")
    genuine = hmac.compare_digest(signed.encode(), signature.encode())
    if not genuine or file not in FILES or expires <= clock.now().timestamp():
        raise NotFound("no such link, or it has expired", code="unknown_link")
    version = await unit.versions.get(ProjectId(project_id), VersionId(version_id))
    version.require_present(clock.now())
    if version.kind is not VersionKind.ADAPTER:
        raise NotFound("no such link, or it has expired", code="unknown_link")
    return FileResponse(artifacts.path(version.location) / file, filename=file)
