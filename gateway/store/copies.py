"""Copies of an object store's artefacts on this machine, bounded: those that were used least recently go first.

Every use is noted as the time of the copy's manifest, which all processes of the machine see. A copy that was used
within ``KEPT_S`` stays whatever the bound says, so that what a trainer reads just now, or an engine may read again
(the gateway notes those, see ``gateway.keeper``), is never taken from under it.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress

from gateway.core.manifest import MANIFEST_NAME
from gateway.store.artifacts import LocalArtifacts

KEPT_S = 900.0
TRIM_EVERY_S = 60.0


class Copies:
    """``limit_bytes`` may be exceeded by what was used lately, and by what comes between two trims."""

    def __init__(self, cache: LocalArtifacts, *, limit_bytes: int, trim_every_s: float = TRIM_EVERY_S) -> None:
        self._cache = cache
        self._limit_bytes = limit_bytes
        self._trim_every_s = trim_every_s
        self._trimmed_at = -trim_every_s

    def note_use(self, location: str) -> None:
        """One that is not here is fine."""
        with suppress(FileNotFoundError):
            os.utime(self._cache.path(location) / MANIFEST_NAME)

    def trim(self, is_stored: Callable[[str], bool]) -> None:
        """Remove copies beyond the bound, if that was not done lately; never one that ``is_stored`` does not know."""
        now = time.monotonic()
        if now - self._trimmed_at < self._trim_every_s:
            return
        self._trimmed_at = now
        sizes = {location: self._size(location) for location in self._cache.locations()}
        excess = sum(sizes.values()) - self._limit_bytes
        for used_at, location in sorted((self._used_at(location), location) for location in sizes):
            if excess <= 0 or used_at > time.time() - KEPT_S:
                return
            if is_stored(location) and self._used_at(location) == used_at:
                with suppress(FileNotFoundError):  # another process is at it
                    self._cache.remove(location)
                excess -= sizes[location]

    def _used_at(self, location: str) -> float:
        """Return 0 for one that is being removed."""
        try:
            return (self._cache.path(location) / MANIFEST_NAME).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def _size(self, location: str) -> int:
        try:
            return sum(path.stat().st_size for path in self._cache.path(location).rglob("*"))
        except FileNotFoundError:
            return 0
