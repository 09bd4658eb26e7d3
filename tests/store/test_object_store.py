"""Artefacts in an object store: the same rules as in a directory, on two machines that share nothing else."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.core.errors import Unavailable
from gateway.core.manifest import MANIFEST_NAME
from gateway.core.ports import CorruptArtifact
from gateway.settings import Settings
from gateway.store.artifact_stores import open_artifacts
from gateway.store.artifacts import LocalArtifacts
from gateway.store.copies import KEPT_S, Copies
from gateway.store.object_store import ObjectArtifacts
from tests.store.s3 import BUCKET, CREDENTIALS, s3_client, s3_server
from tests.store.test_artifacts import LOCATION, _add, _flip_a_bit, _remove, _remove_manifest, _rewrite_manifest, write

Machine = Callable[..., ObjectArtifacts]

KEYS = [f"here/{LOCATION}/{name}" for name in ("adapter_config.json", "deep/weights.safetensors", MANIFEST_NAME)]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as served:
        yield served


@pytest.fixture
def s3(endpoint: str) -> Any:
    client = s3_client(endpoint)
    for key in keys(client):
        client.delete_object(Bucket=BUCKET, Key=key)
    return client


@pytest.fixture
def machine(s3: Any, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return the store as a machine of that name sees it: with a cache of its own."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)

    def open_on(name: str, limit_bytes: int = 2**30) -> ObjectArtifacts:
        cache = LocalArtifacts(tmp_path / name)
        copies = Copies(cache, limit_bytes=limit_bytes, trim_every_s=0)
        return ObjectArtifacts(f"s3://{BUCKET}/here", endpoint=endpoint, cache=cache, copies=copies)

    return open_on


def keys(s3: Any) -> list[str]:
    return sorted(entry["Key"] for entry in s3.list_objects_v2(Bucket=BUCKET).get("Contents", ()))


def test_what_one_machine_commits_another_verifies_from_its_own_copy(machine: Machine, s3: Any) -> None:
    manifest, sha256 = write(machine("a"))  # pyright: ignore
    there = machine("b")

    assert keys(s3) == KEYS
    assert there.verify(LOCATION, sha256) == manifest
    assert there.fetch(LOCATION, None) == manifest
    assert (there.path(LOCATION) / "deep" / "weights.safetensors").read_bytes() == bytes(range(256)) * 40
    s3.delete_object(Bucket=BUCKET, Key=KEYS[0])
    assert there.verify(LOCATION, sha256) == manifest  # it has a copy


@pytest.mark.parametrize("damage", [_flip_a_bit, _remove, _add, _remove_manifest, _rewrite_manifest])
def test_a_copy_that_was_damaged_here_is_brought_again(machine: Machine, damage: Callable[[Path], None]) -> None:
    artifacts = machine("a")
    manifest, sha256 = write(artifacts)  # pyright: ignore
    damage(artifacts.path(LOCATION))

    assert artifacts.verify(LOCATION, sha256) == manifest
    assert len(list(artifacts.path(LOCATION).rglob("*"))) == 4


def test_what_was_damaged_in_the_store_is_never_used(machine: Machine, s3: Any) -> None:
    _, sha256 = write(machine("a"))  # pyright: ignore
    s3.put_object(Bucket=BUCKET, Key=KEYS[1], Body=b"other weights")

    with pytest.raises(CorruptArtifact):
        machine("b").verify(LOCATION, sha256)
    s3.delete_object(Bucket=BUCKET, Key=KEYS[1])
    with pytest.raises(CorruptArtifact, match="does not have all"):
        machine("c").verify(LOCATION, sha256)
    with pytest.raises(CorruptArtifact, match="not the one that was recorded"):
        machine("d").fetch(LOCATION, "0" * 64)


def test_a_manifest_cannot_name_a_file_elsewhere(machine: Machine, s3: Any, tmp_path: Path) -> None:
    write(machine("a"))  # pyright: ignore
    text = s3.get_object(Bucket=BUCKET, Key=KEYS[2])["Body"].read().decode()
    s3.put_object(Bucket=BUCKET, Key=KEYS[2], Body=text.replace("deep/weights", "../../../weights").encode())

    with pytest.raises(CorruptArtifact):
        machine("b").fetch(LOCATION, None)
    assert [path for path in tmp_path.rglob("weights.safetensors") if "a" not in path.relative_to(tmp_path).parts] == []


def test_an_artefact_is_there_with_its_manifest_and_gone_with_it(machine: Machine, s3: Any) -> None:
    artifacts = machine("a")
    _, sha256 = write(artifacts)  # pyright: ignore
    assert artifacts.older_than(-60) == [LOCATION]
    s3.put_object(Bucket=BUCKET, Key="here/ver-02-e1/adapter_config.json", Body=b"{}")  # its writer was lost
    assert artifacts.older_than(-60) == [LOCATION]
    artifacts.tidy(60)
    assert keys(s3) == [*KEYS, "here/ver-02-e1/adapter_config.json"]
    artifacts.tidy(-60)
    assert keys(s3) == KEYS

    other = machine("b")
    other.verify(LOCATION, sha256)
    artifacts.remove(LOCATION)
    artifacts.remove(LOCATION)
    assert keys(s3) == []
    assert not artifacts.path(LOCATION).exists()
    assert other.older_than(-60) == [LOCATION]  # a copy, for the collector, which knows what is still wanted
    other.remove(LOCATION)
    assert other.older_than(-60) == []


def test_a_store_that_is_set_up_later_costs_nothing_that_the_directory_had(machine: Machine, tmp_path: Path) -> None:
    _, sha256 = write(LocalArtifacts(tmp_path / "a"))
    artifacts = machine("a")
    artifacts.tidy(-60)
    assert artifacts.older_than(-60) == [LOCATION]
    assert artifacts.verify(LOCATION, sha256).files


def test_copies_beyond_the_bound_go_the_longest_unused_first_and_come_back_when_they_are_read(
    machine: Machine,
) -> None:
    written = [write(machine("a"), f"ver-{number}-e1") for number in range(4)]
    here = machine("b", limit_bytes=25_000)  # two of about 10,500 bytes

    def is_here(number: int) -> bool:
        return here.path(f"ver-{number}-e1").exists()

    def bring(number: int) -> None:
        assert here.verify(f"ver-{number}-e1", written[number][1]) == written[number][0]

    def rest(number: int, seconds: float) -> None:
        used = time.time() - KEPT_S - seconds
        os.utime(here.path(f"ver-{number}-e1") / MANIFEST_NAME, (used, used))

    for number in range(3):
        bring(number)
    assert [is_here(number) for number in range(4)] == [True, True, True, False]  # all were used just now
    rest(0, 10), rest(1, 30), rest(2, 20)
    here.note_use(["ver-1"])  # an engine holds it
    bring(3)
    assert [is_here(number) for number in range(4)] == [False, True, False, True]
    rest(1, 10)
    bring(0)
    assert [is_here(number) for number in range(4)] == [True, False, False, True]


def test_a_copy_that_the_store_does_not_have_is_never_the_one_to_go(machine: Machine, s3: Any) -> None:
    here = machine("a", limit_bytes=0)
    write(here, "ver-0-e1")
    used = time.time() - KEPT_S - 1
    os.utime(here.path("ver-0-e1") / MANIFEST_NAME, (used, used))
    s3.delete_object(Bucket=BUCKET, Key=f"here/ver-0-e1/{MANIFEST_NAME}")
    write(here, "ver-1-e1")

    assert here.path("ver-0-e1").exists()


def test_a_store_that_is_away_is_said_so_and_takes_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: Machine
) -> None:
    monkeypatch.setattr("gateway.store.object_store._ATTEMPTS", 1)
    cache = LocalArtifacts(tmp_path / "away")
    away = ObjectArtifacts(
        f"s3://{BUCKET}", endpoint="http://127.0.0.1:9", cache=cache, copies=Copies(cache, limit_bytes=0)
    )

    with pytest.raises(Unavailable, match="object store"):
        away.verify(LOCATION, "0" * 64)
    with pytest.raises(OSError, match="did not take"):
        write(away)  # pyright: ignore
    assert not cache.path(LOCATION).exists()


def test_the_settings_choose_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(open_artifacts(Settings(data_dir=tmp_path)), LocalArtifacts)
    assert isinstance(open_artifacts(Settings(data_dir=tmp_path, object_store="s3://bucket/a/b")), ObjectArtifacts)
    for wrong in ("bucket", "s3://B", "https://bucket", "s3://bucket/a b"):
        with pytest.raises(ValueError, match="object_store"):
            Settings(data_dir=tmp_path, object_store=wrong)
