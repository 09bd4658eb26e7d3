"""`make setup` on machines that lack something: it stops with a sentence that says what to do."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the real set-up tools and a lock of two packages that no index has."""
    shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "requirements").mkdir()
    entries = [f"{pin} \\\n    --hash=sha256:{'0' * 64}\n" for pin in ("torch==0.0.1+cpu", "loopline-nowhere==1")]
    (tmp_path / "requirements" / "cpu.lock").write_text("# two packages\n" + "".join(entries))
    return tmp_path


def tell(checkout: Path, code: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run Python code next to the tools of `checkout`."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=checkout / "tools",
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_front_door_and_the_lock_accept_the_same_machines() -> None:
    wanted = tomllib.loads((ROOT / "requirements" / "cpu.toml").read_text())
    code = "import json, setup, installation; print(json.dumps([setup.PYTHONS, installation.MACHINES]))"
    pythons, machines = json.loads(tell(ROOT, code).stdout)

    assert [f"{major}.{minor}" for major, minor in pythons] == wanted["pythons"]
    assert machines == wanted["machines"]


def test_a_wrong_python_is_told_which_ones_work_and_how_to_get_one(checkout: Path) -> None:
    answer = tell(checkout, "import setup; setup.PYTHONS = ((3, 98), (3, 99)); setup.main()")

    assert answer.returncode == 1
    assert "one of 3.98, 3.99 is needed" in answer.stderr
    assert "make PYTHON=/path/to/python3 setup" in answer.stderr


def test_a_wrong_python_goes_on_with_a_right_one_from_path(checkout: Path) -> None:
    other = checkout / "bin" / "python3.99"
    other.parent.mkdir()
    other.write_text('#!/bin/sh\n[ "$2" = "import ensurepip" ] || echo "went on: $*"\n')
    other.chmod(0o755)

    answer = tell(checkout, "import setup; setup.PYTHONS = ((3, 99),); setup.main()", PATH=str(other.parent))

    assert (answer.returncode, answer.stdout) == (0, "went on: -c\n")
    assert f"going on with {other}" in answer.stderr


def test_a_full_disk_is_refused_with_both_numbers(checkout: Path) -> None:
    answer = tell(checkout, "import installation as i; i.need_space(i.ROOT, 10**18)")

    assert f"GB are free in {checkout}; about 1000000000 GB are needed" in answer.stderr


def test_an_unreachable_index_is_named_as_the_cause(checkout: Path) -> None:
    venv = checkout / ".venv"  # one that borrows this environment's pip, because making a whole one takes long
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    [packages] = venv.glob("lib/python*/site-packages")
    (packages / "pip.pth").write_text(sysconfig.get_path("purelib"))
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1", "PIP_CONFIG_FILE": os.devnull}

    answer = tell(checkout, "import installation as i; i.PACKAGES_BYTES = 1; raise SystemExit(i.main())", **nowhere)

    assert answer.returncode == 1
    assert "set-up stopped: no package index can be reached" in answer.stderr
    assert "PIP_INDEX_URL=https://index.example/simple make setup" in answer.stderr


def test_packages_that_were_cut_short_are_installed_again_and_whole_ones_kept(checkout: Path) -> None:
    packages = checkout / ".venv" / "lib" / "python3.11" / "site-packages"
    for name, record in [("whole-1", "whole-1.dist-info/INSTALLER,sha256=x,4\n"), ("torn-2", "torn.py,,\n")]:
        (packages / f"{name}.dist-info").mkdir(parents=True)
        (packages / f"{name}.dist-info" / "RECORD").write_text(record)
    (packages / "bare-3.dist-info").mkdir()
    (packages / "~orn").mkdir()

    answer = tell(checkout, "import installation as i; i.drop_torn_packages(); print(*i.installed())")

    assert answer.stdout == "whole==1\n"
    assert [path.name for path in packages.iterdir()] == ["whole-1.dist-info"]


def test_a_child_ends_with_the_setup_that_started_it(checkout: Path) -> None:
    code = """
import os, signal, subprocess, sys, threading
from pathlib import Path
from console import run
signal.signal(signal.SIGTERM, signal.default_int_handler)
child = "import os, signal; open('child', 'w').write(str(os.getpid())); os.kill(os.getppid(), 15); signal.pause()"
try:
    run([sys.executable, "-c", child], cwd=Path.cwd(), env=dict(os.environ))
except KeyboardInterrupt:
    print("interrupted")
"""
    answer = tell(checkout, code)

    assert answer.stdout == "interrupted\n"
    assert not Path(f"/proc/{(checkout / 'tools' / 'child').read_text()}").exists()


@pytest.mark.parametrize(("ci", "status"), [("", 0), ("true", 1)])
def test_missing_system_packages_are_named_with_the_command_and_fail_only_in_ci(
    ci: str, status: int, checkout: Path
) -> None:
    empty = checkout / "empty"
    empty.mkdir()

    answer = tell(checkout, "import system_packages as s; raise SystemExit(s.main())", PATH=str(empty), CI=ci)

    assert answer.returncode == status
    assert "docker-compose       needed for compose.yaml" in answer.stderr
    assert "sudo apt-get install" in answer.stderr
    assert "nodejs npm docker-compose strace" in answer.stderr


def test_make_alone_lists_every_target() -> None:
    listed = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    phony = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(".PHONY:"))

    assert [line.split()[1] for line in listed.splitlines()] == phony.split()[1:]
