"""Directories of saved versions and snapshots on a local (or shared POSIX) file system.

A directory appears under its final name complete, checksummed and on disk, or not at all: it is written beside, its
manifest last, everything is fsynced, then it is renamed. Nothing under a final name ever changes.
"""

import errno
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from gateway.core.disk import is_missing, read_failed
from gateway.core.errors import Unavailable
from gateway.core.manifest import MANIFEST_NAME, FileEntry, Manifest, parse_manifest
from gateway.core.ports import CorruptArtifact
from gateway.store.files import fsync_directory, fsync_file
from gateway.store.space import short_of_space

LOCATION = re.compile(r"[a-z0-9-]{1,200}")
_STAGING = ".staging"  # cannot clash: a location has no dot


class LocalArtifacts:
    """Artifacts under ``root``, and the trainer's way to write them. The methods block; call them off the loop."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    @property
    def url(self) -> str | None:
        return None

    def path(self, location: str) -> Path:
        """Return the directory of ``location``; it need not exist.

        Raises:
            ValueError: the location is not 1 to 200 of a-z, 0-9 and '-'.
        """
        return self._root / _checked(location)

    def fetch(self, location: str, manifest_sha256: str | None) -> Manifest:
        """Read the manifest and check its hash, if one is known; the files are as they are.

        Raises:
            CorruptArtifact: it is missing, or another one.
            Unavailable: the disk cannot be read.
        """
        try:
            text = (self.path(location) / MANIFEST_NAME).read_bytes()
        except OSError as error:
            if is_missing(error):
                raise CorruptArtifact(f"{location}: no manifest ({error.strerror})") from error
            raise read_failed(error) from error
        if manifest_sha256 not in (None, hashlib.sha256(text).hexdigest()):
            raise CorruptArtifact(f"{location}: the manifest is not the one that was recorded")
        try:
            return parse_manifest(text)
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptArtifact(f"{location}: the manifest cannot be read: {error}") from error

    def verify(self, location: str, manifest_sha256: str | None) -> Manifest:
        """Re-hash manifest and files; a file too many is as wrong as one that is missing.

        Raises:
            CorruptArtifact: something is missing, differs, or does not belong.
            Unavailable: the disk cannot be read.
        """
        manifest, directory = self.fetch(location, manifest_sha256), self.path(location)
        try:
            found = {name: entry for name, entry in describe_files(directory).items() if name != MANIFEST_NAME}
        except OSError as error:
            if is_missing(error):
                raise CorruptArtifact(f"{location}: a file is missing ({error.strerror})") from error
            raise read_failed(error) from error
        _compare(location, found, manifest.files)
        return manifest

    def stage(self, location: str, *, size_bytes: int = 0) -> Path:
        """Return a new empty directory, on the same file system, to write ``location`` in.

        What an earlier, crashed attempt at the same location left is removed.

        Raises:
            FileExistsError: the location is committed already.
            OSError: ENOSPC, the disk is so full that ``size_bytes`` more would use its reserve.
        """
        final = self.path(location)
        if final.exists():
            raise FileExistsError(f"artifact {location} exists and never changes")
        if short_of_space(self._root, size_bytes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._root))
        temporary = self._root / _STAGING / location
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
        return temporary

    def commit(self, temporary: Path, manifest: Manifest) -> str:
        """Make a staged directory final and durable; return the sha256 of its manifest.

        Raises:
            ValueError: ``temporary`` did not come from ``stage``, or its files are not those of ``manifest``.
            FileExistsError: the location was committed meanwhile.
        """
        final = self.path(self.check_staged(temporary, manifest))
        for path in _files(temporary).values():
            fsync_file(path)
        text = manifest.to_json()
        (temporary / MANIFEST_NAME).write_bytes(text)
        fsync_file(temporary / MANIFEST_NAME)
        for directory in [path for path in temporary.rglob("*") if path.is_dir()]:
            fsync_directory(directory)
        fsync_directory(temporary)
        if final.exists():
            raise FileExistsError(f"artifact {temporary.name} exists and never changes")
        temporary.rename(final)
        fsync_directory(self._root)
        return hashlib.sha256(text).hexdigest()

    def check_staged(self, temporary: Path, manifest: Manifest) -> str:
        """Return the location that was staged in ``temporary``. Raises ValueError, as ``commit``."""
        if temporary.parent != self._root / _STAGING:
            raise ValueError(f"{temporary} was not staged here")
        sizes = {name: path.stat().st_size for name, path in _files(temporary).items()}
        if sizes != {name: entry.size_bytes for name, entry in manifest.files.items()}:
            raise ValueError(f"{temporary.name}: the staged files are not those of the manifest")
        return temporary.name

    @contextmanager
    def incoming(self, location: str, manifest_sha256: str | None) -> Generator[Path]:
        """Yield an empty directory that becomes ``location`` at the end, unless that is whole meanwhile."""
        (self._root / _STAGING).mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f"{location}.", dir=self._root / _STAGING))
        try:
            yield temporary
            try:
                self.verify(location, manifest_sha256)
                return
            except (CorruptArtifact, Unavailable):
                self.remove(location)
            temporary.chmod(0o755)
            temporary.rename(self.path(location))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # somebody else brought it meanwhile
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def discard(self, temporary: Path) -> None:
        """Remove a staged directory that will not be committed."""
        if temporary.parent != self._root / _STAGING:
            raise ValueError(f"{temporary} was not staged here")
        shutil.rmtree(temporary, ignore_errors=True)

    def locations(self) -> Sequence[str]:
        """Return all that is committed."""
        return [path.name for path in self._root.glob("[!.]*")]

    def older_than(self, age_s: float) -> Sequence[str]:
        """Return the committed locations that were written longer than ``age_s`` ago."""
        before = time.time() - age_s
        return [path.name for path in self._root.glob("[!.]*") if path.stat().st_mtime < before]

    def tidy(self, age_s: float) -> None:
        """Remove what was staged longer than ``age_s`` ago and never committed."""
        before = time.time() - age_s
        for path in (self._root / _STAGING).glob("*"):
            if path.stat().st_mtime < before:
                shutil.rmtree(path, ignore_errors=True)

    def remove(self, location: str) -> None:
        """Delete a committed artefact; one that is gone already is fine. Nobody may still read it."""
        final = self.path(location)
        if final.exists():
            condemned = self._root / _STAGING / f"{location}.removed"
            condemned.parent.mkdir(exist_ok=True)
            final.rename(condemned)
            shutil.rmtree(condemned)


def describe_files(directory: Path) -> Mapping[str, FileEntry]:
    """Hash every file under ``directory``: what goes into a manifest."""
    entries: dict[str, FileEntry] = {}
    for name, path in _files(directory).items():
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        entries[name] = FileEntry(sha256=sha256, size_bytes=path.stat().st_size)
    return entries


def _files(directory: Path) -> Mapping[str, Path]:
    return {
        str(PurePosixPath(path.relative_to(directory))): path
        for path in sorted(directory.rglob("*"))
        if path.is_symlink() or not path.is_dir()
    }


def _compare(location: str, found: Mapping[str, FileEntry], expected: Mapping[str, FileEntry]) -> None:
    for name in sorted(found.keys() | expected.keys()):
        if name not in found:
            raise CorruptArtifact(f"{location}: {name} is missing")
        if name not in expected:
            raise CorruptArtifact(f"{location}: {name} does not belong to it")
        if found[name] != expected[name]:
            raise CorruptArtifact(f"{location}: {name} is not what was written")


def _checked(location: str) -> str:
    if LOCATION.fullmatch(location) is None:
        raise ValueError(f"artifact location {location[:80]!r} must be 1 to 200 of a-z, 0-9 and '-'")
    return location
