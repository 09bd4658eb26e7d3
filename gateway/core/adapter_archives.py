"""Uploaded archives of an adapter: a tar, plain or gzip, with a PEFT directory's files and nothing that is dangerous.

The archive is a stranger's: members are only ever written under two fixed names, links, devices and sparse files are
refused, and no more is unpacked than the limit, whatever the headers or the compression promise.
"""

import gzip
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

from gateway.core.adapter_files import CONFIG_NAME, MAX_CONFIG_BYTES, WEIGHTS_NAME, BadAdapter

WANTED = (CONFIG_NAME, WEIGHTS_NAME)
IGNORED = ("README.md",)  # PEFT writes a model card beside them
MAX_MEMBERS = 16
_MAX_EXTENDED_BYTES = 64 * 1024
_CHUNK_BYTES = 1 << 20
_BLOCK = tarfile.BLOCKSIZE
_GZIP = b"\x1f\x8b"
_PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE)
_MOVING = ("path", "linkpath", "size", "hdrcharset")  # what an extended header must not change behind the plain one


class BadArchive(BadAdapter):
    """The upload is not an archive of an adapter; the text says what is wrong."""

    default_code = "bad_archive"


def unpack(archive: Path, directory: Path, *, limit_bytes: int) -> None:
    """Write the adapter's two files from ``archive`` into ``directory``. They may lie in one folder of the archive.

    Raises:
        BadArchive: names the member and the rule.
        OSError: a file cannot be read or written.
    """
    with archive.open("rb") as file:
        zipped = file.read(2) == _GZIP
        file.seek(0)
        source = cast("BinaryIO", gzip.GzipFile(fileobj=file)) if zipped else file
        try:
            _unpack(_Limited(source, limit_bytes + (MAX_MEMBERS + 4) * (_BLOCK + _MAX_EXTENDED_BYTES)), directory)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise BadArchive("the archive is not one whole gzip file") from error
    if missing := [name for name in WANTED if not (directory / name).exists()]:
        raise BadArchive(f"the archive has no {missing[0]}", field=missing[0])


class _Limited:
    """A stream that ends in a refusal where it grows too long."""

    def __init__(self, source: BinaryIO, limit_bytes: int) -> None:
        self._source = source
        self._left = self._limit = limit_bytes

    def read(self, size: int) -> bytes:
        """Return exactly ``size`` bytes, a chunk at most, or none at the very end."""
        if size > self._left:
            raise BadArchive(f"the archive unpacks to more than {self._limit} bytes", details={"limit": self._limit})
        found = self._source.read(size)
        if found and len(found) < size:
            raise BadArchive("the archive is cut off")
        self._left -= len(found)
        return found


def _unpack(source: _Limited, directory: Path) -> None:
    folders: set[str] = set()
    for _ in range(2 * MAX_MEMBERS):
        block = source.read(_BLOCK)
        if not block or block == bytes(_BLOCK):
            return
        member = _header(block)
        name = member.name[:100]
        if member.type in (tarfile.XHDTYPE, tarfile.XGLTYPE):
            _check_extended(_whole(source, member))
        elif member.isdir():
            _plain_name(member.name)
        elif member.type not in _PLAIN:
            raise BadArchive(f"{name!r} is no regular file; links and devices are refused", field=name)
        else:
            path = _plain_name(member.name)
            folders.add(str(path.parent))
            if len(folders) > 1:
                raise BadArchive(f"{name!r} lies in another folder than the rest", field=name)
            _take(source, member, path.name, directory)
    raise BadArchive(f"the archive has more than {MAX_MEMBERS} members", details={"limit": MAX_MEMBERS})


def _header(block: bytes) -> tarfile.TarInfo:
    try:
        member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        raise BadArchive("the archive is no tar: a header cannot be read") from error
    if member.size < 0:
        raise BadArchive("the archive is no tar: a size is negative")
    return member


def _plain_name(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or len(path.parts) > 2 or not name.isprintable():
        raise BadArchive(f"{name[:100]!r} must be a file in the archive's root or in one folder", field=name[:100])
    return path


def _take(source: _Limited, member: tarfile.TarInfo, name: str, directory: Path) -> None:
    if name not in (*WANTED, *IGNORED):
        raise BadArchive(
            f"{name[:100]!r} does not belong into an adapter's archive: {', '.join((*WANTED, *IGNORED))}", field=name
        )
    if name != WEIGHTS_NAME and member.size > MAX_CONFIG_BYTES:
        raise BadArchive(f"{name} is larger than {MAX_CONFIG_BYTES} bytes", field=name)
    if (directory / name).exists():
        raise BadArchive(f"{name} is in the archive twice", field=name)
    with (directory / name).open("xb") as file:
        left = member.size
        while left:
            chunk = _some(source, min(left, _CHUNK_BYTES), name)
            file.write(chunk)
            left -= len(chunk)
    if name in IGNORED:
        (directory / name).unlink()
    _pad(source, member)


def _whole(source: _Limited, member: tarfile.TarInfo) -> bytes:
    if member.size > _MAX_EXTENDED_BYTES:
        raise BadArchive(f"an extended header is larger than {_MAX_EXTENDED_BYTES} bytes")
    content = _some(source, member.size, "an extended header") if member.size else b""
    _pad(source, member)
    return content


def _some(source: _Limited, size: int, name: str) -> bytes:
    found = source.read(size)
    if not found:
        raise BadArchive(f"the archive ends within {name}", field=name)
    return found


def _pad(source: _Limited, member: tarfile.TarInfo) -> None:
    if rest := -member.size % _BLOCK:
        _some(source, rest, member.name[:100])


def _check_extended(content: bytes) -> None:
    """Records are ``length key=value``: times and owners pass, what would rename or resize a member does not."""
    while content:
        length, _, rest = content.partition(b" ")
        if not length.isdigit() or len(length) > 6 or not len(length) + 3 < int(length) <= len(content):
            raise BadArchive("an extended header cannot be read")
        key = rest.partition(b"=")[0].decode("utf-8", "replace")
        if key in _MOVING or key.startswith("GNU.sparse"):
            raise BadArchive(f"an extended header sets {key[:40]}, which is not taken", field=key[:40])
        content = content[int(length) :]
