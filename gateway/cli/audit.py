"""`loopline audit`: who changed what, directly from the database."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from gateway.cli.common import AsJson, DataDir, open_store, print_json, print_table, settings_of
from gateway.cli.projects import project_id_of
from gateway.core.audit import COMMAND_LINE, AuditEntry
from gateway.core.ids import ProjectId
from gateway.settings import Settings


def audit(
    project: Annotated[str | None, typer.Option(help="Only what was done in this project.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10000, help="How many entries.")] = 50,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show who changed what, newest first."""
    entries, names = asyncio.run(_entries(settings_of(data_dir), project, limit))
    if as_json:
        print_json([asdict(entry) for entry in entries])
        return
    rows = [
        (
            f"{entry.at:%Y-%m-%d %H:%M:%S}",
            names[entry.project_id],
            entry.actor or COMMAND_LINE,
            entry.action,
            entry.subject,
            entry.request_id or "",
        )
        for entry in entries
    ]
    print_table(["at (UTC)", "project", "by", "did", "to", "request"], rows, empty="Nothing was changed yet.")


async def _entries(
    settings: Settings, project: str | None, limit: int
) -> tuple[Sequence[AuditEntry], Mapping[ProjectId, str]]:
    async with open_store(settings) as database, database.read() as unit:
        names = await unit.keys.projects()
        project_id = None if project is None else project_id_of(names, project)
        return await unit.audit.page(project_id, limit=limit, after=None), names
