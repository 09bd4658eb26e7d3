"""Artefacts appear complete and checksummed, or not at all."""

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.core.canary import Canary
from gateway.core.errors import Unavailable
from gateway.core.manifest import MANIFEST_NAME, FileEntry, Manifest
from gateway.core.ports import CorruptArtifact
from gateway.store.artifacts import LocalArtifacts, describe_files

LOCATION = "ver-01-e3"
CANARY = Canary(tokens=((1, 2, 3),), logprobs=((-0.1, -2.5),), base_logprobs=((-0.2, -2.0),))


@pytest.fixture
def artifacts(tmp_path: Path) -> LocalArtifacts:
    return LocalArtifacts(tmp_path / "artifacts")


def write(artifacts: LocalArtifacts, location: str = LOCATION) -> tuple[Manifest, str]:
    staged = artifacts.stage(location)
    (staged / "adapter_config.json").write_text("{}")
    (staged / "deep").mkdir()
    (staged / "deep" / "weights.safetensors").write_bytes(bytes(range(256)) * 40)
    manifest = Manifest(
        version_id="ver-01", kind="adapter", base_model="tiny", files=describe_files(staged), canary=CANARY
    )
    return manifest, artifacts.commit(staged, manifest)


def test_a_committed_artefact_verifies_and_gives_its_manifest_back(artifacts: LocalArtifacts) -> None:
    manifest, sha256 = write(artifacts)

    assert artifacts.verify(LOCATION, sha256) == manifest
    assert sorted(manifest.files) == ["adapter_config.json", "deep/weights.safetensors"]
    assert manifest.size_bytes == 2 + 256 * 40


def test_a_staged_artefact_does_not_exist_yet(artifacts: LocalArtifacts) -> None:
    staged = artifacts.stage(LOCATION)
    (staged / "file").write_text("x")

    assert not artifacts.path(LOCATION).exists()
    with pytest.raises(CorruptArtifact):
        artifacts.verify(LOCATION, "0" * 64)


def test_staging_again_starts_empty(artifacts: LocalArtifacts) -> None:
    (artifacts.stage(LOCATION) / "left-over").write_text("x")

    assert list(artifacts.stage(LOCATION).iterdir()) == []


def test_a_committed_location_is_never_written_again(artifacts: LocalArtifacts) -> None:
    _, sha256 = write(artifacts)

    with pytest.raises(FileExistsError):
        artifacts.stage(LOCATION)
    artifacts.verify(LOCATION, sha256)


def _flip_a_bit(directory: Path) -> None:
    path = directory / "deep" / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)


def _truncate(directory: Path) -> None:
    path = directory / "deep" / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _remove(directory: Path) -> None:
    (directory / "adapter_config.json").unlink()


def _add(directory: Path) -> None:
    (directory / "pickle.bin").write_bytes(b"x")


def _remove_manifest(directory: Path) -> None:
    (directory / MANIFEST_NAME).unlink()


def _rewrite_manifest(directory: Path) -> None:
    path = directory / MANIFEST_NAME
    path.write_text(path.read_text().replace("tiny", "tinx"))


def _link_outside(directory: Path) -> None:
    path = directory / "adapter_config.json"
    path.unlink()
    path.symlink_to("/nonexistent")


@pytest.mark.parametrize(
    "damage", [_flip_a_bit, _truncate, _remove, _add, _remove_manifest, _rewrite_manifest, _link_outside]
)
def test_any_damage_is_found(artifacts: LocalArtifacts, damage: Callable[[Path], None]) -> None:
    _, sha256 = write(artifacts)
    damage(artifacts.path(LOCATION))

    with pytest.raises(CorruptArtifact):
        artifacts.verify(LOCATION, sha256)


def test_a_disk_that_cannot_be_read_just_now_has_lost_nothing(artifacts: LocalArtifacts) -> None:
    manifest, sha256 = write(artifacts)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))  # EMFILE
    try:
        for read in (artifacts.fetch, artifacts.verify):
            with pytest.raises(Unavailable, match="could not be read"):
                read(LOCATION, sha256)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert artifacts.verify(LOCATION, sha256) == manifest


@pytest.mark.parametrize("location", ["", "../x", "a/b", "A", "a.b", "a\n", "a" * 201])
def test_a_location_is_a_plain_name(artifacts: LocalArtifacts, location: str) -> None:
    for use in (artifacts.path, artifacts.stage):
        with pytest.raises(ValueError, match="must be 1 to 200"):
            use(location)


def test_a_manifest_that_does_not_fit_the_files_is_refused(artifacts: LocalArtifacts) -> None:
    staged = artifacts.stage(LOCATION)
    (staged / "file").write_text("x")
    manifest = Manifest(
        version_id="ver-01",
        kind="state",
        base_model="tiny",
        files={"other": FileEntry(sha256="0" * 64, size_bytes=1)},
        canary=None,
    )

    with pytest.raises(ValueError, match="not those of the manifest"):
        artifacts.commit(staged, manifest)
    assert not artifacts.path(LOCATION).exists()


def test_a_removed_artefact_is_gone_and_removing_it_again_is_fine(artifacts: LocalArtifacts) -> None:
    write(artifacts)

    artifacts.remove(LOCATION)
    artifacts.remove(LOCATION)

    assert not artifacts.path(LOCATION).exists()
