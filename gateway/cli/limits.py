"""`loopline limits`: what a project or a key may ask for, directly in the database."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from gateway.cli.common import AsJson, DataDir, fail, open_store, out, print_json, print_table, settings_of
from gateway.cli.projects import project_id_of
from gateway.core.ids import KeyId, ProjectId
from gateway.core.limits import Limit, LimitScope
from gateway.core.ports import OwnLimit, UnitOfWork
from gateway.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Set, list and lift limits of projects and keys.")
Scope = Annotated[LimitScope, typer.Argument(help="What it is of.")]
Whose = Annotated[str, typer.Argument(help="Name or id of the project, or id of the key.")]
Name = Annotated[Limit, typer.Argument(help="What is limited.")]


@app.command("list")
def list_limits(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the limits that differ from the defaults, and the defaults."""
    settings = settings_of(data_dir)
    own, names = asyncio.run(_all(settings))
    if as_json:
        print_json({"defaults": dict(settings.limits), "own": [asdict(one) for one in own]})
        return
    rows = [("default", "", name.value, str(value)) for name, value in settings.limits.items()]
    rows += [
        (one.scope.value, names.get(ProjectId(one.scope_id), one.scope_id), one.limit.value, str(one.value))
        for one in own
    ]
    print_table(["scope", "of", "limit", "at most"], rows, empty="No limits.", right=["at most"])


@app.command("set")
def set_limit(
    scope: Scope,
    whose: Whose,
    name: Name,
    value: Annotated[int, typer.Argument(min=1, help="At most so many.")],
    data_dir: DataDir = None,
) -> None:
    """Set a limit of a project or a key. It holds within a second."""
    asyncio.run(_change(settings_of(data_dir), scope, whose, name, value))
    out().print(f"{scope} {whose}: {name} is at most {value}.", highlight=False)


@app.command()
def remove(scope: Scope, whose: Whose, name: Name, data_dir: DataDir = None) -> None:
    """Lift a limit: the default counts again."""
    asyncio.run(_change(settings_of(data_dir), scope, whose, name, None))
    out().print(f"{scope} {whose}: {name} is as by default.", highlight=False)


async def _all(settings: Settings) -> tuple[Sequence[OwnLimit], Mapping[ProjectId, str]]:
    async with open_store(settings) as database, database.read() as unit:
        return await unit.limits.own(), await unit.keys.projects()


async def _change(settings: Settings, scope: LimitScope, whose: str, name: Limit, value: int | None) -> None:
    async with open_store(settings) as database, database.write() as unit:
        project_id, scope_id = await _owner(unit, scope, whose)
        if value is not None:
            await unit.limits.set(
                OwnLimit(scope=scope, scope_id=scope_id, project_id=project_id, limit=name, value=value)
            )
        elif not await unit.limits.remove(scope, scope_id, name):
            fail(f"{scope} {whose} has no {name} of its own")
        action = "limits remove" if value is None else "limits set"
        subject = f"{scope}={scope_id}, limit={name}" + ("" if value is None else f", value={value}")
        await unit.audit.add(project_id, actor=None, action=action, subject=subject)


async def _owner(unit: UnitOfWork, scope: LimitScope, whose: str) -> tuple[ProjectId, str]:
    if scope is LimitScope.PROJECT:
        project_id = project_id_of(await unit.keys.projects(), whose)
        return project_id, project_id
    key = await unit.keys.get(KeyId(whose))
    if key is None:
        fail(f"no key has the id {whose}; `loopline keys list` shows them")
    return key.project_id, key.id
