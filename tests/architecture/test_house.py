"""Rules of the house that a review would otherwise repeat: imports, what may stand in files, what files may be."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("gateway", "trainer", "billing", "migrations")
# Unfinished work, and the names of places that exist only where somebody happened to write this.
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b")
PLACES = re.compile(r"/work/|/tmp/[a-z]|\.\./shared|/opt/wheels|\.library\b")


def tracked(*suffixes: str) -> list[Path]:
    """Return the checkout's text files, tracked or new, that git does not ignore."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in done.stdout.splitlines()]
    return [path for path in files if path.is_file() and (not suffixes or path.suffix in suffixes)]


def lines_with(pattern: re.Pattern[str], files: list[Path]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in files
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if pattern.search(line)
    ]


def test_imports_point_one_way() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_nothing_is_left_unfinished() -> None:
    here = Path(__file__)
    files = [path for path in tracked(".py", ".md", ".toml", ".yaml", ".Dockerfile") if path != here]
    assert len(files) > 100
    assert lines_with(UNFINISHED, files) == []


def test_no_file_names_a_place_of_somebodys_own_machine() -> None:
    files = [
        path for path in tracked(".py", ".md", ".toml", ".yaml", ".Dockerfile", ".lock", "") if path != Path(__file__)
    ]
    product = [path for path in files if path.relative_to(ROOT).parts[0] != "tests"]
    assert lines_with(PLACES, product) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_the_supervisor_and_the_cli_needs_no_torch(package: str) -> None:
    """The gateway's image has none; ``trainer`` here means its settings, which the docs' tests read."""
    modules = {"gateway": "gateway.cli", "trainer": "trainer.settings"}
    code = f"import sys, {modules.get(package, package)}; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0


def test_modules_stay_small() -> None:
    """Split by noun before 400 lines."""
    long = {
        str(path.relative_to(ROOT)): count
        for path in tracked(".py")
        if path.relative_to(ROOT).parts[0] in PACKAGES and (count := len(path.read_text().splitlines())) > 420
    }
    assert long == {}
