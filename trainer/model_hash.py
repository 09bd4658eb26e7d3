"""The identity of a base model: one hash over the files that decide what it computes."""

import hashlib
from pathlib import Path


def hash_model(directory: Path) -> str:
    """Return the hex sha256 over name and content hash of ``config.json`` and every safetensors file, by name."""
    total = hashlib.sha256()
    for path in sorted([*directory.glob("*.safetensors"), *directory.glob("config.json")]):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{content}  {path.name}\n".encode())
    return total.hexdigest()
