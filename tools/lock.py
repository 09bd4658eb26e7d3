"""Write requirements/cpu.lock from pyproject.toml and requirements/cpu.toml: `make lock`.

uv resolves for every Python and machine of cpu.toml at once, in a throw-away environment. From its
answer this script keeps, per package, the hashes of the wheels those machines can install, so the
lock stays readable, names no index and no path, and installing it compiles nothing.

Needs Python 3.11+ and a package index; the project's own environment is not touched.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
TOOLS = ("uv==0.13.9", "packaging==26.4")
HEADER = """\
# Written by `make lock` from pyproject.toml and requirements/cpu.toml. Do not edit.
# Install with: pip install --no-deps --require-hashes --only-binary :all: -r requirements/cpu.lock
"""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One kind of machine the lock serves: CPython `python` on Linux `machine`."""

    python: str
    machine: str

    def environment(self) -> dict[str, str]:
        """The marker environment of PEP 508."""
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": f"{self.python}.1",
            "python_version": self.python,
            "sys_platform": "linux",
        }


def main() -> int:
    if sys.argv[1:2] == ["--inside"]:  # the second half, in the environment that has uv and packaging
        write_lock(Path(sys.argv[2]))
        return 0
    with tempfile.TemporaryDirectory(prefix="loopline-lock-") as scratch:
        print("making a throw-away environment with uv", flush=True)
        tools = Path(scratch) / "tools"
        venv.create(tools, with_pip=True)
        subprocess.run([tools / "bin/python", "-m", "pip", "install", "--quiet", *TOOLS], check=True)
        subprocess.run([tools / "bin/python", __file__, "--inside", scratch], check=True)
    return 0


def write_lock(scratch: Path) -> None:
    """Resolve, filter, and replace cpu.lock in one step."""
    wanted = tomllib.loads((REQUIREMENTS / "cpu.toml").read_text())
    targets = [Target(python=python, machine=machine) for python in wanted["pythons"] for machine in wanted["machines"]]
    packages = resolve(scratch, wanted)
    blocks: dict[str, str] = dict(sorted([*locked(packages, targets), locked_torch(targets)]))
    path = REQUIREMENTS / "cpu.lock"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(HEADER + "".join(blocks.values()))
    temporary.replace(path)
    print(f"{path.relative_to(ROOT)}: {len(blocks)} entries, {path.stat().st_size // 1024} KiB")


def resolve(scratch: Path, wanted: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the packages of uv's universal resolution, in pylock form."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    roots = [*project["dependencies"], *wanted["packages"]]
    for extra in wanted["extras"]:
        roots += [need for need in project["optional-dependencies"][extra] if not need.startswith(project["name"])]
    newest = max(int(python.split(".")[1]) for python in wanted["pythons"])
    machines = " or ".join(f"platform_machine == '{machine}'" for machine in wanted["machines"])
    environment = (
        "sys_platform == 'linux' and platform_python_implementation == 'CPython' "
        f"and python_version <= '3.{newest}' and ({machines})"
    )
    never = [f"{name} ; sys_platform == 'never'" for name in wanted["left_out"]]
    (scratch / "pyproject.toml").write_text(f'[tool.uv]\nenvironments = ["{environment}"]\n')
    (scratch / "roots.in").write_text("\n".join(roots))
    (scratch / "pins.in").write_text("\n".join(wanted["pins"]))
    (scratch / "never.in").write_text("\n".join(never))
    command = ["-m", "uv", "pip", "compile", "roots.in", "-c", "pins.in", "--override", "never.in", "--universal"]
    command += ["--quiet", "--python-version", wanted["pythons"][0], "--format", "pylock.toml", "-o", "pylock.toml"]
    # uv has certificates of its own; where pip was told of others, uv needs them too.
    environ = dict(os.environ)
    if "PIP_CERT" in environ:
        environ.setdefault("SSL_CERT_FILE", environ["PIP_CERT"])
    subprocess.run([sys.executable, *command], cwd=scratch, check=True, stdout=subprocess.DEVNULL, env=environ)
    return tomllib.loads((scratch / "pylock.toml").read_text())["packages"]


def locked(packages: list[dict[str, Any]], targets: list[Target]) -> Iterator[tuple[str, str]]:
    """Yield (sort key, lock text) for every package that some target needs."""
    from packaging.markers import Marker

    for package in packages:
        marker = Marker(package["marker"]) if "marker" in package else None
        needed = [target for target in targets if marker is None or marker.evaluate(target.environment())]
        if needed:
            requirement = f"{package['name']}=={package['version']}{condition(needed, targets)}"
            yield f"{package['name']}=={package['version']}", entry(requirement, hashes(package, needed))


def locked_torch(targets: list[Target]) -> tuple[str, str]:
    """Torch's entry, from the hand-kept list of CPU wheels."""
    from packaging.utils import parse_wheel_filename

    lines = [line.split() for line in (REQUIREMENTS / "torch-cpu.sha256").read_text().splitlines() if line[:1] != "#"]
    versions = {str(parse_wheel_filename(name)[1]) for _, name in lines}
    if len(versions) != 1:
        raise SystemExit(f"torch-cpu.sha256 names {len(versions)} versions, not one")
    [version] = versions
    wheels = [{"url": f"/{name}", "hashes": {"sha256": digest}} for digest, name in lines]
    package = {"name": "torch", "version": version, "wheels": wheels}
    return f"torch=={version}", entry(f"torch=={version}", hashes(package, targets))


def hashes(package: dict[str, Any], targets: list[Target]) -> set[str]:
    """The digests of every wheel that a target would install; each target must have one."""
    wheels = {wheel["url"].rsplit("/", 1)[1]: wheel["hashes"]["sha256"] for wheel in package.get("wheels", [])}
    for target in targets:
        if not any(installs(name, target) for name in wheels):
            raise SystemExit(f"{package['name']} {package['version']} has no wheel for {target}")
    return {digest for name, digest in wheels.items() if any(installs(name, target) for target in targets)}


def installs(wheel: str, target: Target) -> bool:
    """Whether pip on `target` (glibc 2.31 or newer) takes this wheel file."""
    from packaging.tags import Tag, compatible_tags, cpython_tags
    from packaging.utils import parse_wheel_filename

    version = (3, int(target.python.split(".")[1]))
    old = {"manylinux2014": 17, "manylinux2010": 12, "manylinux1": 5}
    platforms = [f"manylinux_2_{minor}_{target.machine}" for minor in range(31, 4, -1)]
    platforms += [f"{name}_{target.machine}" for name in old] + [f"linux_{target.machine}"]
    supported: set[Tag] = set(cpython_tags(version, platforms=platforms))
    supported |= set(compatible_tags(version, f"cp3{version[1]}", platforms))
    return not supported.isdisjoint(parse_wheel_filename(wheel.replace("%2B", "+"))[3])


def condition(needed: list[Target], targets: list[Target]) -> str:
    """The marker that picks `needed` out of `targets`, as short as the choice allows."""
    if len(needed) == len(targets):
        return ""
    pythons = sorted({target.python for target in needed})
    machines = sorted({target.machine for target in needed})
    if len(needed) != len(pythons) * len(machines):
        raise SystemExit(f"no simple marker for {needed}")
    parts: list[str] = []
    if len(pythons) < len({target.python for target in targets}):
        parts.append(" or ".join(f'python_version == "{python}"' for python in pythons))
    if len(machines) < len({target.machine for target in targets}):
        parts.append(" or ".join(f'platform_machine == "{machine}"' for machine in machines))
    return " ; " + (parts[0] if len(parts) == 1 else " and ".join(f"({part})" for part in parts))


def entry(requirement: str, digests: set[str]) -> str:
    """One requirement and its hashes, in pip's form."""
    return " \\\n".join([requirement, *(f"    --hash=sha256:{digest}" for digest in sorted(digests))]) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
