"""The pinned lock: complete, hashed, free of places, and for the machines that set-up accepts."""

import re
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCK = (ROOT / "requirements" / "cpu.lock").read_text()
WANTED: dict[str, Any] = tomllib.loads((ROOT / "requirements" / "cpu.toml").read_text())
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SHA256 = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?")


def entries() -> dict[str, list[str]]:
    """Requirement line -> its hash lines."""
    found: dict[str, list[str]] = {}
    requirement = ""
    for line in LOCK.splitlines():
        if line.startswith(" "):
            found[requirement].append(line)
        elif not line.startswith("#"):
            requirement = line.removesuffix(" \\")
            found[requirement] = []
    return found


def locked_versions() -> dict[str, set[str]]:
    versions: dict[str, set[str]] = {}
    for line in entries():
        requirement = Requirement(line)
        versions.setdefault(canonicalize_name(requirement.name), set()).add(str(requirement.specifier)[2:])
    return versions


def test_every_package_is_pinned_and_hashed() -> None:
    for requirement, hashes in entries().items():
        assert re.match(r"[a-z0-9-]+==\S+", requirement), requirement
        assert hashes, requirement
        assert all(SHA256.fullmatch(line) for line in hashes), requirement


def test_the_lock_names_no_index_and_no_path() -> None:
    assert not re.search(r"https?:|file:|index-url|find-links|(^|\s)/\w", LOCK, re.MULTILINE)


def test_the_lock_holds_what_the_project_asks_for_in_a_version_it_accepts() -> None:
    asked = [*PROJECT["dependencies"], *WANTED["packages"], *WANTED["pins"]]
    for extra in WANTED["extras"]:
        asked += [need for need in PROJECT["optional-dependencies"][extra] if not need.startswith("loopline-server")]
    versions = locked_versions()

    for need in map(Requirement, asked):
        assert all(need.specifier.contains(version) for version in versions[canonicalize_name(need.name)]), need


def test_what_breaks_on_a_cpu_machine_is_left_out() -> None:
    assert set(WANTED["left_out"]) - {"torch"} <= set(WANTED["left_out"]) - locked_versions().keys()


def test_torch_is_the_cpu_build_with_one_wheel_for_each_python_and_machine() -> None:
    listed = [line.split() for line in (ROOT / "requirements" / "torch-cpu.sha256").read_text().splitlines()]
    wheels = {name: digest for digest, name in (words for words in listed if words[0] != "#")}
    [(requirement, hashes)] = [(line, hashes) for line, hashes in entries().items() if line.startswith("torch==")]

    assert requirement.endswith("+cpu")
    assert {line.split(":")[1].split()[0] for line in hashes} == set(wheels.values())
    assert {(name.split("-")[2], name.split("_", 3)[3]) for name in wheels} == {
        (f"cp{python.replace('.', '')}", f"{machine}.whl")
        for python in WANTED["pythons"]
        for machine in WANTED["machines"]
    }
