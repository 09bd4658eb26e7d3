"""Files from a gateway and to it: cut downloads go on where they ended, and what came is what was named."""

import hashlib
import io
import tarfile
from pathlib import Path

import httpx
from pydantic import BaseModel

from loopline._transport import Transport, checked
from loopline.errors import ConnectionFailed, ResultMismatchError

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


class ExportedFile(BaseModel):
    """One file of a version, and where it can be fetched."""

    name: str
    size_bytes: int
    sha256: str | None
    url: str


class Exported(BaseModel):
    """The files of a version."""

    version: str
    files: list[ExportedFile]
    archive: ExportedFile


async def download(transport: Transport, file: ExportedFile, target: Path, *, during: str) -> None:
    """Write ``file`` to ``target``, which appears whole and checked or not at all; what an earlier try left is used.

    Raises:
        ApiError, ConnectionFailed: as the gateway answered, or did not.
        ResultMismatchError: the bytes are not those that were named.
    """
    partial = target.with_name(f"{target.name}.part")
    partial.parent.mkdir(parents=True, exist_ok=True)

    async def attempt() -> httpx.Response:
        done = partial.stat().st_size if partial.exists() else 0
        async with transport.stream(file.url, start=done) as response:
            if response.is_success:
                with partial.open("ab" if response.status_code == 206 else "wb") as out:
                    async for chunk in response.aiter_bytes():
                        out.write(chunk)
            else:
                await response.aread()
            return response

    while not partial.exists() or partial.stat().st_size < file.size_bytes:
        try:
            checked((await transport.retry.answer(attempt, lambda trouble: None)).response, during)
        except httpx.TransportError as error:
            raise ConnectionFailed(f"{during}: no answer for {file.name}: {error}", during) from error
        if file.size_bytes == 0:
            break
    with partial.open("rb") as content:
        sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    if partial.stat().st_size != file.size_bytes or file.sha256 not in (None, sha256):
        partial.unlink()
        raise ResultMismatchError(f"{during}: {file.name} is not what the gateway named")
    partial.replace(target)


def archive_of(adapter: Path) -> bytes:
    """Return the tar of a PEFT directory's two files, or the archive that ``adapter`` is already.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if not adapter.is_dir():
        return adapter.read_bytes()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name in ADAPTER_FILES:
            archive.add(adapter / name, name)
    return out.getvalue()
