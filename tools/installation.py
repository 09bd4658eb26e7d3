"""Make everything Loopline needs, from nothing or from a half-made state: `make setup`.

Stages: check the machine, make `.venv`, install requirements/cpu.lock into it, install this project and its SDK
(editable), prepare the base model. Each finished stage is remembered in `.venv/loopline-setup.json`, so a second run
takes a moment and an interrupted one goes on where it stopped. Standard library only.
"""

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TextIO

from console import Refusal, elapsed, run, run_logged, say

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
CACHE = ROOT / ".cache"
LOCK = ROOT / "requirements" / "cpu.lock"
STAMP = VENV / "loopline-setup.json"
PROJECTS = (ROOT, ROOT / "clients" / "python")

MACHINES = ("x86_64", "aarch64")  # as in requirements/cpu.toml
GLIBC = (2, 31)
PACKAGES_BYTES = 8 * 10**9  # 3.8 GB installed, and as much again while pip downloads and unpacks
MODEL_BYTES = 10**9
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
IMPORTS = "fastapi, sqlalchemy.ext.asyncio, alembic, openai, peft, transformers, vllm.entrypoints.openai.api_server"
BASE_MODEL = "smollm2-135m-instruct"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make setup", description="Prepare everything Loopline needs.")
    default = Path(os.environ.get("LOOPLINE_DATA_DIR") or ROOT / ".loopline")
    parser.add_argument("--data-dir", type=Path, default=default, help="holds the base model (default: %(default)s)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = time.monotonic()
    try:
        check_machine()
        CACHE.mkdir(exist_ok=True)
        with (CACHE / "setup.lock").open("w") as lock:
            wait_for(lock)
            stages = [make_environment(), install_packages(), install_project(), prepare_model(options.data_dir)]
    except Refusal as refusal:
        say(f"\nset-up stopped: {refusal}")
        return 1
    except KeyboardInterrupt:
        say("\nset-up interrupted. Run the same command again: it goes on where it stopped.")
        return 130
    if any(stages):
        say(f"set-up finished in {elapsed(started)}")
    return 0


def check_machine() -> None:
    """Refuse a machine for which the lock has no packages."""
    libc, version = platform.libc_ver()
    if sys.platform != "linux" or platform.machine() not in MACHINES or libc != "glibc":
        raise Refusal(
            f"this is {platform.system()} on {platform.machine()}; the pinned CPU packages are for Linux (glibc) on "
            f"{' or '.join(MACHINES)}.\nElsewhere, run Loopline in a container: compose.yaml, profile cpu."
        )
    if tuple(int(part) for part in version.split(".")[:2]) < GLIBC:
        raise Refusal(f"glibc is {version}; the pinned packages need 2.31 or newer (Debian 11, Ubuntu 20.04)")
    if importlib.util.find_spec("ensurepip") is None:
        raise Refusal("this Python cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv")


def make_environment() -> bool:
    """Make `.venv`, unless a working one is there; return whether anything was done."""
    if (VENV / "bin").is_dir():
        if PYTHON.exists() and run([PYTHON, "-c", "import pip"], cwd=ROOT, env=environment()) == 0:
            return False
        say("the environment in .venv is incomplete: making it anew")
    need_space(ROOT, PACKAGES_BYTES)
    say(f"[1/4] making .venv with Python {platform.python_version()}")
    remove(VENV)
    if run([sys.executable, "-m", "venv", VENV], cwd=ROOT, env=environment()) != 0:
        raise Refusal("Python could not make .venv; its own words are above")
    return True


def install_packages() -> bool:
    """Install the lock; torch first, because its CPU build may need an index of its own."""
    text = LOCK.read_text()
    digest = hashlib.sha256(text.encode()).hexdigest()
    if stamp().get("packages") == digest:
        return False
    drop_torn_packages()
    entries = lock_entries(text)
    torch = [entry for entry in entries if entry.startswith("torch==")]
    if torch[0].split()[0] in installed():
        say(f"[2/4] bringing {len(entries)} packages to their pinned versions (Ctrl-C is safe)")
    else:
        need_space(ROOT, PACKAGES_BYTES)
        say(f"[2/4] installing {len(entries)} pinned packages (3.8 GB, some minutes; Ctrl-C is safe)")
    part = CACHE / "torch.lock"
    part.write_text("".join(torch))
    if pip_install(part, label="torch", count=1) != 0:
        if unreachable("torch"):
            raise Refusal(pip_trouble("torch"))
        say(f"      torch's CPU build is not on the configured index; trying {TORCH_CPU_INDEX}")
        if pip_install(part, label="torch", count=1, options=["--extra-index-url", TORCH_CPU_INDEX]) != 0:
            raise Refusal(pip_trouble("torch"))
    if pip_install(LOCK, label="packages", count=len(entries)) != 0:
        raise Refusal(pip_trouble("packages"))
    check_imports()
    remember("packages", digest)
    return True


def check_imports() -> None:
    """Import what the processes import: it proves the packages work together and leaves them compiled."""
    log = CACHE / "imports.log"
    command = [PYTHON, "-c", f"import {IMPORTS}"]
    if run_logged(command, cwd=VENV, env=environment(), log=log, progress=lambda: "checking the packages") != 0:
        last = "\n".join(f"    {line}" for line in log.read_text(errors="replace").splitlines()[-8:])
        raise Refusal(f"the installed packages do not work together:\n{last}")


def install_project() -> bool:
    """Install the server and the SDK in editable form, when their metadata changed."""
    digest = hashlib.sha256()
    for project in PROJECTS:
        digest.update((project / "pyproject.toml").read_bytes())
    digest.update(" ".join(sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))).encode())
    if stamp().get("project") == digest.hexdigest():
        return False
    say("[3/4] installing this project (editable)")
    command = [PYTHON, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    for project in PROJECTS:
        command += ["--editable", project]
    if run(command, cwd=ROOT, env=environment()) != 0:
        raise Refusal("pip could not install the project; its own words are above")
    remember("project", digest.hexdigest())
    return True


def prepare_model(data_dir: Path) -> bool:
    """Convert the base model; `trainer.base_models` does it whole or not at all."""
    models = data_dir.resolve() / "models"
    if (models / BASE_MODEL).is_dir():
        return False
    models.mkdir(parents=True, exist_ok=True)
    need_space(models, MODEL_BYTES)
    say(f"[4/4] preparing the base model {BASE_MODEL}")
    command = [PYTHON, "-m", "trainer.base_models", "prepare", BASE_MODEL, "--models-dir", models]
    if run(command, cwd=ROOT, env=environment()) != 0:
        raise Refusal("the base model could not be prepared; the reason is above")
    return True


def pip_install(requirements: Path, *, label: str, count: int, options: list[str] | None = None) -> int:
    """Run pip on one requirements file, show how far it is, and return its exit status."""
    command = [PYTHON, "-m", "pip", "install", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    command += ["--no-compile", "--progress-bar", "off", *(options or []), "-r", requirements]
    log = pip_log(label)

    def progress() -> str:
        lines = log.read_text(errors="replace").splitlines()
        if any(line.startswith("Installing collected") for line in lines):
            return f"unpacking {label}: {len(installed())} in place"
        found = sum(line.startswith(("Collecting ", "Requirement already")) for line in lines)
        return f"fetching {label}: {found} of {count}"

    return run_logged(command, cwd=ROOT, env=environment(), log=log, progress=progress)


def pip_trouble(label: str) -> str:
    """What pip's log means, as a sentence, with its last lines."""
    text = pip_log(label).read_text(errors="replace")
    if "No space left" in text:
        cause = "the disk is full. Free some space and run `make setup` again"
    elif unreachable(label):
        cause = (
            "no package index can be reached. Check the network, or name your own index:\n"
            "  PIP_INDEX_URL=https://index.example/simple make setup   (also PIP_PROXY, PIP_CERT)"
        )
    elif "DO NOT MATCH THE HASHES" in text:
        cause = "the index serves another file than the pinned one; try another index (PIP_INDEX_URL)"
    elif "No matching distribution" in text:
        cause = "the index lacks a pinned package; try another index (PIP_INDEX_URL)"
    else:
        cause = "pip failed"
    last = "\n".join(f"    {line}" for line in text.splitlines()[-8:])
    return f"{cause}.\npip's last words (all of them: {pip_log(label).relative_to(ROOT)}):\n{last}"


def unreachable(label: str) -> bool:
    """Whether pip met no index at all."""
    signs = ("NewConnectionError", "NameResolutionError", "Connection refused", "ConnectTimeout", "ProxyError")
    text = pip_log(label).read_text(errors="replace")
    return any(sign in text for sign in signs)


def pip_log(label: str) -> Path:
    return CACHE / f"pip-{label}.log"


def lock_entries(text: str) -> list[str]:
    """The lock's requirements, each with its hash lines."""
    entries: list[str] = []
    for line in text.splitlines(keepends=True):
        if line.startswith(" "):
            entries[-1] += line
        elif not line.startswith("#"):
            entries.append(line)
    return entries


def site_packages() -> Path:
    return next(VENV.glob("lib/python*/site-packages"))


def installed() -> list[str]:
    """`name==version` of what is in the environment, by its metadata directories."""
    return [path.name.removesuffix(".dist-info").replace("-", "==") for path in site_packages().glob("*.dist-info")]


def drop_torn_packages() -> None:
    """Forget packages whose installation was cut short, so that pip installs them again.

    pip writes INSTALLER, and the RECORD that lists it, after everything else.
    """
    for metadata in site_packages().glob("*.dist-info"):
        record = metadata / "RECORD"
        if not record.exists() or "/INSTALLER," not in record.read_text(errors="replace"):
            say(f"      {metadata.name.removesuffix('.dist-info')} was only half installed: again")
            remove(metadata)
    for leftover in site_packages().glob("~*"):
        remove(leftover)


def environment() -> dict[str, str]:
    """What children see: ours, without what would lead Python or pip out of `.venv`."""
    ours = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return ours | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_USER": "0", "PYTHONNOUSERSITE": "1"}


def wait_for(lock: TextIO) -> None:
    """Let another set-up of this checkout finish first."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        say("another set-up of this checkout is running; waiting for it")
        fcntl.flock(lock, fcntl.LOCK_EX)


def need_space(path: Path, size_bytes: int) -> None:
    free = shutil.disk_usage(path).free
    if free < size_bytes:
        raise Refusal(f"{free / 1e9:.1f} GB are free in {path}; about {size_bytes / 1e9:.0f} GB are needed")


def stamp() -> dict[str, str]:
    """The finished stages and what they were made from."""
    return json.loads(STAMP.read_text()) if STAMP.exists() else {}


def remember(stage: str, digest: str) -> None:
    temporary = STAMP.with_suffix(".tmp")
    temporary.write_text(json.dumps(stamp() | {stage: digest}))
    temporary.replace(STAMP)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
