"""Adapters that come as the body of a request: written to disk as they arrive, unpacked, read to the last number."""

import asyncio
import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import Request

from gateway.core.adapter_archives import unpack
from gateway.core.adapter_files import AdapterLayout, read_adapter
from gateway.core.disk import write_failed
from gateway.core.errors import Invalid
from gateway.core.ids import new_upload_location
from gateway.core.manifest import FileEntry, Manifest
from gateway.core.payloads import Upload
from gateway.core.ports import Artifacts
from gateway.wire.bodies import BodyTooLarge
from gateway.wire.routes import DialectRoute

MEDIA_TYPES = frozenset({"application/x-tar", "application/gzip", "application/octet-stream"})
_RAW_NAME = "archive"
_SLACK_BYTES = 1 << 20  # headers and padding of an archive
_CHUNK_BYTES = 1 << 20
_COPIES = 2  # the archive, and what was in it


class UploadRoute(DialectRoute):
    """A route whose body is a file."""

    reads_body = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """An adapter that is in the store now; ``sha256`` is that of the archive it came in."""

    upload: Upload
    layout: AdapterLayout
    sha256: str


async def receive(request: Request, artifacts: Artifacts, *, limit_bytes: int) -> Received:
    """Take the adapter that is the request's body.

    Raises:
        BodyTooLarge, Invalid: no archive of an adapter that can be served and trained; says why.
        Unavailable: there is no room on disk.
    """
    announced = _check_headers(request, limit_bytes)
    location = new_upload_location()
    try:
        temporary = await asyncio.to_thread(artifacts.stage, location, size_bytes=announced * _COPIES)
        try:
            sha256 = await _write(request, temporary / _RAW_NAME, limit_bytes)
            layout, manifest_sha256 = await asyncio.to_thread(_accept, artifacts, temporary, limit_bytes)
        finally:
            await asyncio.to_thread(artifacts.discard, temporary)
    except OSError as error:
        raise write_failed(error) from error
    upload = Upload(location=location, manifest_sha256=manifest_sha256)
    return Received(upload=upload, layout=layout, sha256=sha256)


def _check_headers(request: Request, limit_bytes: int) -> int:
    """Return the announced size in bytes; 0: none is."""
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given not in MEDIA_TYPES:
        raise Invalid(f"Content-Type must be {' or '.join(sorted(MEDIA_TYPES))}", field="Content-Type")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Invalid(
            "send the archive itself, without a Content-Encoding", code="unsupported_encoding", field="Content-Encoding"
        )
    length = request.headers.get("content-length", "")
    announced = int(length) if length.isdecimal() else 0
    if announced > limit_bytes + _SLACK_BYTES:
        raise BodyTooLarge(limit_bytes)
    return announced


async def _write(request: Request, path: Path, limit_bytes: int) -> str:
    """Write the body; return its sha256."""
    sha256, size, pending = hashlib.sha256(), 0, bytearray()
    with path.open("xb") as file:
        async for chunk in request.stream():
            sha256.update(chunk)
            size += len(chunk)
            if size > limit_bytes + _SLACK_BYTES:
                raise BodyTooLarge(limit_bytes)
            pending += chunk
            if len(pending) >= _CHUNK_BYTES:
                await asyncio.to_thread(file.write, pending)
                pending = bytearray()
        await asyncio.to_thread(file.write, pending)
    return sha256.hexdigest()


def _accept(artifacts: Artifacts, temporary: Path, limit_bytes: int) -> tuple[AdapterLayout, str]:
    """Unpack, read and commit."""
    unpack(temporary / _RAW_NAME, temporary, limit_bytes=limit_bytes)
    (temporary / _RAW_NAME).unlink()
    layout = read_adapter(temporary)
    files: dict[str, FileEntry] = {}
    for path in sorted(temporary.iterdir()):
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        files[path.name] = FileEntry(sha256=sha256, size_bytes=path.stat().st_size)
    manifest = Manifest(version_id=temporary.name, kind="upload", base_model="", files=files, canary=None)
    return layout, artifacts.commit(temporary, manifest)
