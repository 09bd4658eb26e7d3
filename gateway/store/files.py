"""Durable files: what fsync has to be called on."""

import os
from pathlib import Path


def fsync_file(path: Path) -> None:
    """Return when the content of ``path`` is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_directory(path: Path) -> None:
    """Return when the entries of directory ``path`` (names, renames) are on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
