"""The manifest of an artefact: every file with its sha256, and the canary.

It is written last, and its own hash is the version's.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gateway.core.canary import Canary

MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of an artefact; lower-case hex."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """``files`` maps a relative name to its entry; a state or merged model has no canary.

    ``lineage`` says where the files come from: session, seq, optimizer step, LoRA configuration, base model's hash.
    """

    version_id: str
    kind: str
    base_model: str
    files: Mapping[str, FileEntry]
    canary: Canary | None
    lineage: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def to_json(self) -> bytes:
        """Return canonical bytes: equal manifests are equal bytes."""
        return json.dumps(asdict(self), sort_keys=True, indent=1, allow_nan=False).encode()

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files.values())


def parse_manifest(text: bytes) -> Manifest:
    """Read what ``to_json`` wrote.

    Raises:
        ValueError, KeyError, TypeError: the text is not a manifest.
    """
    document: dict[str, Any] = json.loads(text)
    canary = document["canary"]
    return Manifest(
        version_id=document["version_id"],
        kind=document["kind"],
        base_model=document["base_model"],
        files={name: FileEntry(**entry) for name, entry in document["files"].items()},
        canary=None
        if canary is None
        else Canary(**{name: tuple(tuple(row) for row in rows) for name, rows in canary.items()}),
        lineage=document.get("lineage", {}),
    )
