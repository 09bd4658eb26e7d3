"""Exports and imports."""

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

from gateway.wire.native.schemas.base import Read


class ExportedFile(Read):
    """A file, and where it can be fetched without a key; the archive is made as it is sent and has no ``sha256``."""

    name: str
    size_bytes: int
    sha256: str | None
    url: str


class ExportRead(Read):
    """A version's files; the links end at ``expires_at``."""

    version: str
    kind: str
    base_model: str
    expires_at: datetime
    files: list[ExportedFile]
    archive: ExportedFile


class ImportQuery(BaseModel):
    """What the adapter is of, and the labels of its version."""

    model_config = ConfigDict(extra="forbid")

    base_model: str
    name: str | None = None
    description: str = ""
    tags: list[str] = Field(default=[])
    ttl_seconds: int | None = None
