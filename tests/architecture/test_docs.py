"""The docs keep up with the code: settings, error codes, routes, commands, links."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import SecretStr
from pydantic_settings import BaseSettings
from starlette.routing import Route

from gateway.cli.app import create_cli
from gateway.core.errors import Kind
from gateway.settings import Settings
from gateway.wire.native.app import create_native_app
from gateway.wire.native.errors import STATUS
from gateway.wire.openai.app import create_openai_app
from gateway.wire.openai.errors import TABLE
from gateway.wire.openai.fields import REFUSED
from gateway.wire.sagemaker.errors import TABLE as SAGEMAKER
from gateway.wire.tinker.errors import TABLE as TINKER
from tests.architecture import openai_fields
from trainer.settings import TrainerSettings

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PARTS = ["Context", "Decision", "Consequences", "Alternatives"]
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])


def settings_rows(settings: type[BaseSettings]) -> list[str]:
    """Return the table rows that operations.md must hold for a settings class."""
    return [
        f"| `LOOPLINE_{name.upper()}` | {_default(field.default)} | {field.description} |"
        for name, field in settings.model_fields.items()
    ]


def _default(value: Any) -> str:
    match value:
        case None:
            return ""
        case SecretStr():
            return ""
        case _:
            return f"`{value}`"


@pytest.mark.parametrize(("process", "settings"), [("gateway", Settings), ("trainer", TrainerSettings)])
def test_every_setting_stands_in_the_operations_guide_with_its_default(
    process: str, settings: type[BaseSettings]
) -> None:
    text = (DOCS / "operations.md").read_text()
    section = text.split(f"<!-- settings: {process} -->")[1].split("\n\n")[0]
    assert section.strip().splitlines()[2:] == settings_rows(settings)


def error_codes() -> Iterator[str]:
    """Yield every error code that the sources name: ``code=``, ``default_code``, and the store's ``..._not_found``."""
    for path in [*ROOT.glob("gateway/**/*.py"), *ROOT.glob("trainer/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.keyword(arg="code", value=value):
                    yield from _texts(value)
                case ast.Assign(targets=[ast.Name(id="default_code")], value=value):
                    yield from _texts(value)
                case ast.Call(func=ast.Name(id="missing"), args=[ast.Constant(value=str(what)), *_]):
                    yield f"{what.replace(' ', '_')}_not_found"
                case _:
                    pass


def _texts(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.IfExp(body=body, orelse=orelse):
            yield from _texts(body)
            yield from _texts(orelse)
        case _:
            pass


def test_every_error_code_is_explained_and_every_explained_one_exists() -> None:
    rows = re.findall(r"^\| `([a-z_]+)` \| ([a-z_]+) \|", (DOCS / "errors.md").read_text(), re.MULTILINE)
    explained = {code for code, kind in rows if kind in set(Kind)}
    named = set(error_codes())
    assert len(named) > 50
    assert named - explained == set()
    sources = "".join(path.read_text() for folder in ("gateway", "trainer") for path in (ROOT / folder).rglob("*.py"))
    assert {code for code in explained - named if f'"{code}"' not in sources} == set()


def test_the_table_of_kinds_is_the_dialects_own() -> None:
    row = r"^\| `([a-z_]+)` \| (\d+)[^|]*\| (\d+) \| (\d+) \| (\d+)[^|]*\|"
    rows = re.findall(row, (DOCS / "errors.md").read_text(), re.MULTILINE)
    assert {kind: tuple(map(int, statuses)) for kind, *statuses in rows} == {
        kind.value: (STATUS[kind], TABLE[kind][0], TINKER[kind][0], SAGEMAKER[kind][0]) for kind in Kind
    }


def routes(app: Any) -> Iterator[tuple[str, str]]:
    for route in app.routes:
        if isinstance(route, Route) and not route.path.startswith(("/docs", "/openapi", "/redoc")):
            for method in sorted((route.methods or set()) - {"HEAD"}):
                yield method, re.sub(r":\w+}", "}", route.path)


def test_every_native_route_stands_on_the_curl_page() -> None:
    text = (DOCS / "clients" / "curl.md").read_text()
    method = "GET|POST|PUT|PATCH|DELETE"
    documented = set(re.findall(rf"\b({method})((?:\|(?:{method}))*) (/[^\s`,]+)", text))
    known = {(method, path) for first, more, path in documented for method in [first, *more.split("|")] if method}
    assert set(routes(create_native_app())) - known == set()


def test_every_openai_route_stands_on_the_openai_page() -> None:
    text = (DOCS / "clients" / "openai.md").read_text()
    missing = [f"{method} /v1{path}" for method, path in routes(create_openai_app())]
    assert [line for line in missing if line not in text] == []


def test_the_tables_of_openai_fields_are_the_codes_own() -> None:
    page = openai_fields.PAGE.read_text()
    assert openai_fields.with_tables(page) == page, "python -m tests.architecture.openai_fields writes them anew"


def test_every_field_of_openais_clients_is_honoured_or_refused_for_a_reason() -> None:
    for schema, known in openai_fields.TABLES.values():
        assert set(known) - set(schema.model_fields) <= set(REFUSED)


def commands(group: Any, prefix: str = "") -> Iterator[str]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}"


def test_every_command_of_the_cli_is_mentioned() -> None:
    text = "".join(page.read_text() for page in PAGES)
    known = list(commands(typer.main.get_command(create_cli())))
    assert {"up", "keys create", "sessions stop", "db upgrade", "doctor"} <= set(known)
    assert [command for command in known if f"loopline {command}" not in text] == []


def test_links_between_pages_lead_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text())
        if not target.startswith(("http://", "https://")) and not (page.parent / target).exists()
    ]
    assert broken == []


def test_every_decision_is_one_page_of_four_parts_and_listed() -> None:
    pages = sorted((DOCS / "decisions").glob("0*.md"))
    index = (DOCS / "decisions" / "README.md").read_text()
    assert len(pages) >= 8
    for page in pages:
        text = page.read_text()
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == [
            "Context",
            "Decision",
            "Consequences",
            "Alternatives",
        ], page
        assert len(text.splitlines()) <= 60, page
        assert f"({page.name})" in index
