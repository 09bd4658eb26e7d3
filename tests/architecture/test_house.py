"""Rules of the house that a review would otherwise repeat: imports, what may stand in files, what files may be."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from gateway.app import DIALECTS
from gateway.wire.sagemaker.app import create_sagemaker_app

ROOT = Path(__file__).parents[2]
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b")
TEXT = (".py", ".md", ".toml", ".yaml", ".Dockerfile", ".lock", "")
MAX_LINES = 450


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


def test_git_tracks_nothing_that_it_ignores() -> None:
    listed = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.stdout == ""


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


def test_no_dependency_of_a_route_costs_a_trip_to_a_thread() -> None:
    def all_of(dependant: Dependant) -> Iterator[Dependant]:
        yield dependant
        for inner in dependant.dependencies:
            yield from all_of(inner)

    apps = {mount: create() for mount, create in DIALECTS.items()}
    routes = [
        route
        for app in (*apps.values(), create_sagemaker_app(openai=apps["/v1"]))
        for route in app.routes
        if isinstance(route, APIRoute)
    ]
    blocking = {
        f"{route.path}: {dependant.call}"
        for route in routes
        for dependant in all_of(route.dependant)
        if not (dependant.is_coroutine_callable or dependant.is_async_gen_callable)
    }

    assert len(routes) > 90
    assert blocking == set()


def test_nothing_is_left_unfinished() -> None:
    files = [path for path in tracked(*TEXT) if path != Path(__file__)]
    assert len(files) > 100
    assert lines_with(UNFINISHED, files) == []


def test_no_file_names_the_place_where_this_checkout_happens_to_be() -> None:
    neighbours = [f"../{path.name}/" for path in ROOT.parent.iterdir() if path.is_dir() and path != ROOT]
    places = "|".join(re.escape(place) for place in [f"{ROOT}/", *neighbours])
    assert lines_with(re.compile(rf"(?<![\w.])({places})"), tracked(*TEXT)) == []


@pytest.mark.parametrize("module", ["gateway.cli", "gateway.app", "trainer.settings", "billing.prices", "migrations"])
def test_the_gateways_image_needs_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'vllm', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_modules_are_split_before_they_need_a_table_of_contents() -> None:
    packages = ("gateway", "trainer", "billing", "migrations", "tools")
    sizes = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in tracked(".py")
        if path.relative_to(ROOT).parts[0] in packages
    }
    assert len(sizes) > 100
    assert {name: size for name, size in sizes.items() if size > MAX_LINES} == {}
