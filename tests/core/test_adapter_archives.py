"""Uploaded archives: what tar and gzip write of a PEFT directory is taken, everything clever is refused by name."""

import gzip
import io
import tarfile
from pathlib import Path

import pytest

from gateway.core.adapter_archives import BadArchive, unpack
from gateway.core.adapter_files import CONFIG_NAME, WEIGHTS_NAME

LIMIT = 1 << 20
FILES = {CONFIG_NAME: b"{}", WEIGHTS_NAME: b"x" * 3000}


def tar(files: dict[str, bytes], *, format: int = tarfile.GNU_FORMAT, folder: str = "", mtime: float = 0) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=format) as archive:
        if folder:
            directory = tarfile.TarInfo(folder)
            directory.type = tarfile.DIRTYPE
            archive.addfile(directory)
        for name, content in files.items():
            info = tarfile.TarInfo(folder + name)
            info.size, info.mtime = len(content), mtime
            archive.addfile(info, io.BytesIO(content))
    return target.getvalue()


def special(kind: bytes, name: str = WEIGHTS_NAME, link: str = "/etc/passwd") -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


def opened(tmp_path: Path, content: bytes, limit_bytes: int = LIMIT) -> dict[str, bytes]:
    (tmp_path / "upload").write_bytes(content)
    directory = tmp_path / "out"
    directory.mkdir()
    unpack(tmp_path / "upload", directory, limit_bytes=limit_bytes)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize(
    "content",
    [
        tar(FILES),
        tar(FILES, folder="adapter/"),
        tar(FILES, folder="./"),
        tar(FILES, format=tarfile.PAX_FORMAT, mtime=1.5),
        tar(FILES | {"README.md": b"# a model card"}),
        gzip.compress(tar(FILES)),
    ],
    ids=["plain", "folder", "dot", "pax", "card", "gzip"],
)
def test_what_tar_writes_of_an_adapter_is_unpacked(tmp_path: Path, content: bytes) -> None:
    assert opened(tmp_path, content) == FILES


def renamed() -> bytes:
    """A pax header that gives the next member another name."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo(WEIGHTS_NAME)
        info.pax_headers = {"path": "../../etc/cron.d/x"}
        archive.addfile(info, io.BytesIO(b""))
    return target.getvalue()


def oversized() -> bytes:
    info = tarfile.TarInfo(WEIGHTS_NAME)
    info.size = 1 << 40
    return info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (tar({"../" + WEIGHTS_NAME: b""}), "root"),
        (tar({"/" + WEIGHTS_NAME: b""}), "root"),
        (tar({"a/b/" + WEIGHTS_NAME: b""}), "root"),
        (tar({"a/" + CONFIG_NAME: b"", "b/" + WEIGHTS_NAME: b""}), "another folder"),
        (tar({"evil.py": b""}), "does not belong"),
        (tar({"adapter_model.bin": b""}), "does not belong"),
        (tar({CONFIG_NAME: b"{}"}), "no adapter_model.safetensors"),
        (tar({CONFIG_NAME: b" " * (1 << 21)}), "larger"),
        (tar(FILES)[:4608] + tar(FILES), "twice"),
        (special(tarfile.SYMTYPE), "no regular file"),
        (special(tarfile.LNKTYPE), "no regular file"),
        (special(tarfile.CHRTYPE), "no regular file"),
        (special(tarfile.GNUTYPE_SPARSE), "no regular file"),
        (special(tarfile.GNUTYPE_LONGNAME), "no regular file"),
        (renamed(), "sets path"),
        (oversized(), "cut off"),
        (tar(FILES)[:2000], "cut off"),
        (gzip.compress(tar(FILES))[:-40], "gzip"),
        (b"PK\x03\x04" + bytes(600), "no tar"),
        (b"", "no adapter_config.json"),
        (gzip.compress(tar({WEIGHTS_NAME: bytes(4 * LIMIT)})), "unpacks to more"),
        (tar({f"{n}/": b"" for n in range(99)}), "another folder|belong|members"),
    ],
)
def test_a_dangerous_or_broken_archive_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    with pytest.raises(BadArchive, match=reason):
        opened(tmp_path, content)
    written = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*")}
    assert written == {"upload", "out"}


def test_nothing_is_unpacked_beyond_the_limit(tmp_path: Path) -> None:
    bomb = gzip.compress(tar({WEIGHTS_NAME: bytes(64 * LIMIT)}))
    assert len(bomb) < LIMIT // 10
    with pytest.raises(BadArchive, match="unpacks to more"):
        opened(tmp_path, bomb)
    assert sum(path.stat().st_size for path in (tmp_path / "out").iterdir()) < 3 * LIMIT


def test_many_empty_members_end_in_a_refusal(tmp_path: Path) -> None:
    folders = b"".join(special(tarfile.DIRTYPE, f"d{n}/")[:512] for n in range(1000))
    with pytest.raises(BadArchive, match="members"):
        opened(tmp_path, folders)
