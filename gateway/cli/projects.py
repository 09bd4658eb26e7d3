"""`loopline projects`: who owns what, directly in the database."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Annotated

import typer

from gateway.cli.common import AsJson, DataDir, fail, open_store, out, print_json, print_table, settings_of
from gateway.core.clock import SystemClock
from gateway.core.errors import GatewayError
from gateway.core.ids import ProjectId
from gateway.core.usage import HOUSE
from gateway.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Make and list projects.")


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="What the project is called.")],
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Make a project. Its keys come from `loopline keys create --project`."""
    try:
        project_id = asyncio.run(_create(settings_of(data_dir), name))
    except GatewayError as error:
        fail(error.message)
    if as_json:
        print_json({"id": project_id, "name": name})
        return
    out().print(f"Project {name} is {project_id}.", highlight=False)


@app.command("list")
def list_projects(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the projects and how many keys of each are valid."""
    names, valid = asyncio.run(_all(settings_of(data_dir)))
    if as_json:
        print_json([{"id": id, "name": name, "valid_keys": valid[id]} for id, name in names.items()])
        return
    rows = [(id, name, str(valid[id])) for id, name in names.items()]
    print_table(["id", "name", "valid keys"], rows, empty="No projects yet.", right=["valid keys"])


def project_id_of(names: Mapping[ProjectId, str], project: str) -> ProjectId:
    """Return the id of the project with this name or id, or end the program."""
    for id, name in names.items():
        if project in (id, name):
            return id
    fail(f"there is no project {project}; `loopline projects list` shows them")


async def _create(settings: Settings, name: str) -> ProjectId:
    async with open_store(settings) as database, database.write() as unit:
        project_id = await unit.keys.create_project(name)
        await unit.audit.add(project_id, actor=None, action="projects create", subject=f"project={name}")
        return project_id


async def _all(settings: Settings) -> tuple[Mapping[ProjectId, str], Counter[ProjectId]]:
    now = SystemClock().now()
    async with open_store(settings) as database, database.read() as unit:
        names, keys = await unit.keys.projects(), await unit.keys.all()
    valid = Counter(key.project_id for key in keys if not key.ended(now))
    return {id: name for id, name in names.items() if id != HOUSE}, valid
