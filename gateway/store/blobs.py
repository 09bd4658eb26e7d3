"""Tenant content by (project, sha256): up to 256 KiB in the transaction itself, larger in files that are fsynced first.

A file each would undo the group commit; a large row would bloat the database.
"""

import asyncio
import hashlib
import mmap
import os
import secrets
import sys
from datetime import timedelta
from pathlib import Path

from sqlalchemy import Executable, Table, and_, bindparam, select

from gateway.core.bodies import Body
from gateway.core.codec import decode_payload
from gateway.core.disk import write_failed
from gateway.core.ids import ProjectId
from gateway.core.payloads import Forward, ForwardBackward, Payload
from gateway.core.records import CorruptRecord
from gateway.store.files import fsync_directory
from gateway.store.space import require_space
from gateway.store.tables import blobs
from gateway.store.text import missing, require_id
from gateway.store.transaction import Transaction

LARGEST_ROW_BYTES = 256 * 1024
KEPT = timedelta(hours=24)  # how long results and answers to idempotency keys can be read
UNNAMED = timedelta(hours=1)  # how long a blob stays that no row names (yet)


class SqlBlobStore:
    """BlobStore. A file whose transaction was rolled back is harmless: its name is its content."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    async def put(self, project_id: ProjectId, content: bytes) -> str:
        digest = await _digest_aside(content)
        await self._add_row(project_id, digest, content)
        if is_large(content):
            await asyncio.to_thread(_write, self._transaction.blob_dir, project_id, content)
        return digest

    async def accept(self, project_id: ProjectId, content: bytes) -> str:
        digest = await _digest_aside(content)
        mine = and_(blobs.c.project_id == project_id, blobs.c.digest == digest)
        if await self._transaction.first(select(blobs.c.digest).where(mine)) is None:
            require_space(self._transaction.blob_dir, len(content))
        return await self.put(project_id, content)

    async def add(self, project_id: ProjectId, body: Body) -> None:
        """As the port says. Should the collector have taken a large body's file meanwhile, it is written again here."""
        require_space(self._transaction.blob_dir, len(body.content))
        await self._add_row(project_id, body.digest, body.content)
        root = self._transaction.blob_dir
        if is_large(body.content) and not _blob_path(root, project_id, body.digest).exists():
            _write(root, project_id, body.content)

    async def _add_row(self, project_id: ProjectId, digest: str, content: bytes) -> None:
        now = self._transaction.clock.now()
        row = {
            "project_id": project_id,
            "digest": digest,
            "size_bytes": len(content),
            "content": None if is_large(content) else content,
            "created_at": now,
        }
        await self._transaction.write(self._transaction.once(_insert, blobs), {**row, "aging": now - UNNAMED / 2})

    async def get(self, project_id: ProjectId, digest: str) -> bytes:
        return bytes(await self._view(project_id, digest))

    async def _view(self, project_id: ProjectId, digest: str) -> bytes | memoryview:
        require_id(digest, "blob")
        row = await self._transaction.first(
            select(blobs.c.content).where(and_(blobs.c.project_id == project_id, blobs.c.digest == digest))
        )
        if row is None:
            raise missing("blob", digest)
        if row["content"] is not None:
            return bytes(row["content"])
        return await asyncio.to_thread(map_blob_file, self._transaction.blob_dir, project_id, digest)

    async def get_payload(self, project_id: ProjectId, digest: str) -> Payload:
        return decode_payload(await self._view(project_id, digest))


def _insert(transaction: Transaction, table: Table) -> Executable:
    """Return an INSERT that makes a blob that is there, and no longer young, young again."""
    statement = transaction.insert(table)
    return statement.on_conflict_do_update(  # also locks the row: the collector leaves it alone
        index_elements=[blobs.c.project_id, blobs.c.digest],
        set_={"created_at": statement.excluded.created_at},
        where=blobs.c.created_at < bindparam("aging", type_=blobs.c.created_at.type),
    )


def is_large(content: bytes) -> bool:
    """Whether content lies in a file of its own."""
    return len(content) > LARGEST_ROW_BYTES


async def prepare(root: Path, project_id: ProjectId, payload: Payload) -> Body:
    """As ``Database.prepare`` says."""
    if not isinstance(payload, Forward | ForwardBackward):
        return Body.of(payload)
    body = await asyncio.to_thread(Body.of, payload)
    if is_large(body.content):
        require_space(root, len(body.content))
        await asyncio.to_thread(_write, root, project_id, body.content)
    return body


def _write(root: Path, project_id: ProjectId, content: bytes) -> None:
    try:
        write_blob_file(root, project_id, content)
    except OSError as error:
        raise write_failed(error) from error


def write_blob_file(root: Path, project_id: ProjectId, content: bytes) -> str:
    """Write ``content`` durably under its digest, all or nothing; return the digest."""
    digest = _digest(content)
    path = _blob_path(root, project_id, digest)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{digest}.{secrets.token_hex(8)}")
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    for directory in (path.parent, path.parent.parent, root):  # also when the file exists: its entry may be new
        fsync_directory(directory)
    return digest


def map_blob_file(root: Path, project_id: ProjectId, digest: str) -> memoryview:
    """Return the content of a blob file, mapped: the system reads and drops its pages as they are used.

    The view stays good when the file is deleted. Blob files are never changed in place.

    Raises:
        CorruptRecord: the file is gone or is not what was stored.
    """
    try:
        with _blob_path(root, project_id, digest).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (FileNotFoundError, ValueError):  # ValueError: an empty file
        raise CorruptRecord(f"the file of blob {digest} is gone or empty") from None
    if hashlib.sha256(mapped).hexdigest() != digest:
        raise CorruptRecord(f"the file of blob {digest} was changed")
    if sys.platform == "linux":
        mapped.madvise(mmap.MADV_DONTNEED)  # hashing has brought in every page
    return memoryview(mapped)


def remove_blob_file(root: Path, project_id: ProjectId, digest: str) -> None:
    """Delete a blob's file; one that is gone already is fine."""
    _blob_path(root, project_id, digest).unlink(missing_ok=True)


async def _digest_aside(content: bytes) -> str:
    return await asyncio.to_thread(_digest, content) if is_large(content) else _digest(content)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _blob_path(root: Path, project_id: ProjectId, digest: str) -> Path:
    return root / project_id / digest[:2] / digest
