"""Archives that are never written: what tar reads from them, and every range of them."""

import io
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.tarballs import Content, FilePart, tarball

SIZES = {"adapter_config.json": 700, "adapter_model.safetensors": 600_000, "empty": 0}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return {name: os.urandom(size) for name, size in SIZES.items()}


@pytest.fixture(scope="module")
def archive(files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Content:
    directory = tmp_path_factory.mktemp("files")
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return tarball([(name, FilePart(directory / name, len(content))) for name, content in files.items()])


def test_tar_finds_the_files_and_nothing_else_in_an_archive(archive: Content, files: dict[str, bytes]) -> None:
    whole = b"".join(archive.read(0, archive.size_bytes))

    with tarfile.open(fileobj=io.BytesIO(whole)) as opened:
        members = opened.getmembers()
        found = {member.name: opened.extractfile(member).read() for member in members}  # pyright: ignore
    assert found == files
    assert all(member.isreg() and (member.uid, member.mtime, member.mode) == (0, 0, 0o644) for member in members)
    assert len(whole) == archive.size_bytes


def test_any_range_of_an_archive_is_a_slice_of_it(archive: Content) -> None:
    whole = b"".join(archive.read(0, archive.size_bytes))
    places = st.integers(0, archive.size_bytes)

    @given(places, places)
    def check(start: int, stop: int) -> None:
        assert b"".join(archive.read(start, stop)) == whole[start:stop]

    check()


def test_a_file_that_was_cut_meanwhile_is_an_error_and_no_short_answer(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    with pytest.raises(OSError, match="shorter"):
        list(tarball([("a", FilePart(tmp_path / "a", 9))]).read(0, 2000))
