"""`loopline versions` and `loopline serve`, and the SDK's calls of the same names, against one running gateway."""

import asyncio
import json
import shlex
import tarfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

import loopline as sdk
from gateway.core.adapter_files import CONFIG_NAME, WEIGHTS_NAME
from gateway.core.scripted import SCRIPTED_NAME
from tests.cli.runner import loopline
from tests.core.test_adapter_files import tensors, write
from tests.supervisor.live import MODEL, LiveUp, train_one_step


@pytest.fixture(scope="module")
def saved(live: LiveUp) -> str:
    """The address of a published version."""
    with live.client() as client:
        session = client.post("/sessions", json={"base_model": MODEL, "model_package_group": "cli-versions"}).json()
        return train_one_step(client, session["id"])


@pytest.fixture
def where(live: LiveUp) -> tuple[str, str]:
    return "--data-dir", str(live.data_dir)


@pytest.fixture(scope="module")
def service(live: LiveUp) -> Iterator[sdk.ServiceClient]:
    with sdk.ServiceClient(live.url, live.key) as client:
        yield client


def test_versions_are_listed_shown_named_and_judged_again(saved: str, where: tuple[str, str]) -> None:
    named = loopline("versions", "alias", saved, "champion", *where)
    assert named.stdout == f"cli-versions@champion is {saved}.\n"
    table = loopline("versions", "list", "cli-versions", *where).stdout.splitlines()
    assert table[0].split() == ["version", "kind", "state", "aliases", "name", "step", "bytes", "saved"]
    assert table[1].split()[:4] == [saved, "adapter", "published", "champion"]
    listed = json.loads(loopline("versions", "list", "--kind", "adapter", "--json", *where).stdout)
    shown = json.loads(loopline("versions", "show", "cli-versions@champion", "--json", *where).stdout)
    assert shown["address"] == saved
    assert shown in listed

    words = loopline("versions", "show", saved, *where).stdout
    assert shown["fingerprint"] in words
    assert "gate" in words
    judged = loopline("versions", "verify", saved, *where)
    assert (judged.returncode, " passed " in judged.stdout) == (0, True)
    dropped = loopline("versions", "alias", saved, "champion", "--drop", *where)
    assert dropped.stdout == "cli-versions@champion names nothing any more.\n"


def test_a_version_is_deleted_only_with_force_while_it_is_used_and_brought_back(
    saved: str, where: tuple[str, str]
) -> None:
    kept = loopline("versions", "delete", saved, *where)
    assert (kept.returncode, "force deletes it" in kept.stderr) == (1, True)
    assert loopline("versions", "delete", saved, "--force", *where).returncode == 0
    assert saved not in loopline("versions", "list", *where).stdout
    assert " deleted " in loopline("versions", "list", "--deleted", *where).stdout
    assert loopline("versions", "undelete", saved, *where).stdout == f"{saved} is back.\n"


def test_a_version_is_exported_as_files_and_as_an_archive(saved: str, where: tuple[str, str], tmp_path: Path) -> None:
    files = loopline("versions", "export", saved, str(tmp_path / "files"), *where)
    archive = loopline("versions", "export", saved, str(tmp_path), "--archive", *where)

    assert files.stdout.split() == [str(tmp_path / "files" / SCRIPTED_NAME)]
    with tarfile.open(archive.stdout.strip()) as opened:
        content = opened.extractfile(SCRIPTED_NAME).read()  # pyright: ignore
    assert content == (tmp_path / "files" / SCRIPTED_NAME).read_bytes()


def test_a_cut_export_goes_on_and_a_wrong_one_is_thrown_away(
    saved: str, where: tuple[str, str], tmp_path: Path, service: sdk.ServiceClient
) -> None:
    (whole,) = service.versions.export(saved, tmp_path / "sdk")
    content = whole.read_bytes()
    part = f"{SCRIPTED_NAME}.part"
    cut, wrong = tmp_path / "cut", tmp_path / "wrong"
    for directory, start in ((cut, content[:30]), (wrong, b"?" * 30)):
        directory.mkdir()
        (directory / part).write_bytes(start)

    assert loopline("versions", "export", saved, str(cut), *where).returncode == 0
    assert (cut / SCRIPTED_NAME).read_bytes() == content
    assert "is not what the gateway named" in loopline("versions", "export", saved, str(wrong), *where).stderr
    for directory, start in ((cut, content[:30]), (wrong, b"?" * 30)):
        (directory / SCRIPTED_NAME).unlink(missing_ok=True)
        (directory / part).write_bytes(start)
    service.versions.export(saved, cut)
    with pytest.raises(sdk.ResultMismatchError, match="is not what the gateway named"):
        service.versions.export(saved, wrong)
    assert ((cut / SCRIPTED_NAME).read_bytes(), list(wrong.iterdir())) == (content, [])


def test_an_adapter_is_imported_from_a_directory_or_a_tar(
    where: tuple[str, str], tmp_path: Path, service: sdk.ServiceClient
) -> None:
    write(tmp_path, tensors())
    options = ("--base-model", MODEL, "--name", "guest", "--tag", "peft")
    done = loopline("versions", "import", "cli-guests", str(tmp_path), *options, "--json", *where)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["version"] == "cli-guests@1"

    with tarfile.open(tmp_path / "adapter.tar", mode="w") as archive:
        for name in (CONFIG_NAME, WEIGHTS_NAME):
            archive.add(tmp_path / name, name)
    second = service.versions.import_("cli-guests", tmp_path / "adapter.tar", base_model=MODEL, tags=["peft"])
    assert second.version == "cli-guests@2"
    assert [version.number for version in service.versions.list("cli-guests", tag="peft")] == [2, 1]
    training = service.create_training_client_from_state(second.version)
    assert training.save_weights_for_sampler().result().number == 1

    (tmp_path / CONFIG_NAME).write_text("{}")
    refused = loopline("versions", "import", "cli-guests", str(tmp_path), "--base-model", MODEL, *where)
    assert (refused.returncode, refused.stderr) == (1, "error: r must be a whole number of at least 1\n")
    with pytest.raises(sdk.InvalidRequest, match="bad_adapter"):
        service.versions.import_("cli-guests", tmp_path, base_model=MODEL)


def test_the_sdk_has_the_same_calls(saved: str, service: sdk.ServiceClient) -> None:
    versions = service.versions
    assert versions.alias(saved, "sdk").aliases == ["sdk"]
    assert versions.show("cli-versions@sdk").address == saved
    with pytest.raises(sdk.Conflict, match="version_aliased"):
        versions.delete(saved, force=True)
    versions.unalias("cli-versions", "sdk")
    assert versions.delete(saved, force=True).deleted_at is not None
    assert versions.undelete(saved).deleted_at is None
    assert versions.verify(saved).passed
    assert [version.address for version in versions.list("cli-versions", max_results=1)] == [saved]
    assert asyncio.run(versions.show_async(saved)).address == saved
    with pytest.raises(sdk.NotFound):
        versions.show("cli-versions@99")


def test_serve_prints_the_command_of_an_adapter_on_its_base(
    saved: str, live: LiveUp, where: tuple[str, str], tmp_path: Path
) -> None:
    done = loopline("serve", saved, "--directory", str(tmp_path), "--base-path", "/models/base", *where)

    words = shlex.split(done.stdout)
    options = dict(pairwise(words))
    assert "vllm.entrypoints.openai.api_server" in words
    assert options["--model"] == "/models/base"
    assert options["--served-model-name"] == MODEL
    assert options["--lora-modules"] == f"{saved}={tmp_path}"
    assert options["--max-lora-rank"] == "32"
    assert (tmp_path / SCRIPTED_NAME).exists()


def test_serve_prints_the_command_of_a_merged_model_and_refuses_a_state(
    live: LiveUp, where: tuple[str, str], tmp_path: Path
) -> None:
    with live.client() as client:
        session = client.post("/sessions", json={"base_model": MODEL, "model_package_group": "cli-merged"}).json()["id"]
        merged = client.post(f"/sessions/{session}/save_weights", json={"merge_weights": True}).json()["id"]
        state = client.post(f"/sessions/{session}/save_state", json={}).json()["id"]
        for operation in (merged, state):
            client.get(f"/operations/{operation}", params={"wait": 30})

    words = shlex.split(loopline("serve", "cli-merged@1", "--directory", str(tmp_path), *where).stdout)
    options = dict(pairwise(words))
    assert (options["--model"], options["--served-model-name"]) == (str(tmp_path), "cli-merged@1")
    assert "--enable-lora" not in words
    refused = loopline("serve", "cli-merged@2", *where)
    assert (refused.returncode, "is a state" in refused.stderr) == (1, True)
