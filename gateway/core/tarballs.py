"""A tar archive that is never written: every byte follows from the files it holds, so any range of it can be read.

Regular files only, in the order given, without owners or times: equal files make equal archives.
"""

import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_END = bytes(2 * tarfile.BLOCKSIZE)
_CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class FilePart:
    """A file as it lies on disk; its size must not change."""

    path: Path
    size_bytes: int


Part = bytes | FilePart


@dataclass(frozen=True, slots=True)
class Content:
    """Bytes that are read piece by piece: texts and files, one after the other."""

    parts: Sequence[Part]

    @property
    def size_bytes(self) -> int:
        return sum(map(_size, self.parts))

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes from ``start`` up to ``stop``, a quarter of a MiB at a time. Blocks.

        Raises:
            OSError: a file is gone, or shorter than it was.
        """
        begin = 0
        for part in self.parts:
            first, last = max(start - begin, 0), min(stop - begin, _size(part))
            if first < last:
                yield from [part[first:last]] if isinstance(part, bytes) else _slice(part, first, last)
            begin += _size(part)


def tarball(files: Sequence[tuple[str, FilePart]]) -> Content:
    """Return the archive of ``files``, by their names in it."""
    parts: list[Part] = []
    for name, file in files:
        info = tarfile.TarInfo(name)
        info.size, info.mode = file.size_bytes, 0o644
        parts += [info.tobuf(tarfile.GNU_FORMAT), file, bytes(-file.size_bytes % tarfile.BLOCKSIZE)]
    return Content([*parts, _END])


def _size(part: Part) -> int:
    return len(part) if isinstance(part, bytes) else part.size_bytes


def _slice(part: FilePart, first: int, last: int) -> Iterator[bytes]:
    with part.path.open("rb") as file:
        file.seek(first)
        while first < last:
            chunk = file.read(min(last - first, _CHUNK_BYTES))
            if not chunk:
                raise OSError(f"{part.path.name} is shorter than it was")
            first += len(chunk)
            yield chunk
