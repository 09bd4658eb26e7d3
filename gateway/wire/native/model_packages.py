"""Model package groups and their versions."""

from typing import Annotated

from fastapi import APIRouter, Path, Query

from gateway.core.errors import NotFound
from gateway.core.ids import VersionId
from gateway.wire.deps import Caller, Reading
from gateway.wire.native.render import version_read
from gateway.wire.native.schemas.base import PageQuery
from gateway.wire.native.schemas.model_packages import GroupList, GroupRead, VersionPage, VersionRead
from gateway.wire.routes import DialectRoute
from gateway.wire.targets import find_version

router = APIRouter(route_class=DialectRoute, tags=["model packages"])


@router.get("/model_packages")
async def list_groups(principal: Caller, unit: Reading) -> GroupList:
    """List the project's groups."""
    return GroupList(
        data=[
            GroupRead(
                name=group.name,
                versions=group.versions,
                created_at=group.created_at,
                latest={kind.value: number for kind, number in group.latest.items()},
            )
            for group in await unit.versions.groups(principal.project_id)
        ]
    )


@router.get("/model_packages/{group}")
async def list_versions(
    group: str, query: Annotated[PageQuery, Query()], principal: Caller, unit: Reading
) -> VersionPage:
    """List a group's versions, newest first."""
    after = None if query.after is None else VersionId(query.after)
    versions = await unit.versions.page(principal.project_id, group=group, limit=query.limit, after=after)
    if not versions and group not in {known.name for known in await unit.versions.groups(principal.project_id)}:
        raise NotFound("no such model package group", code="unknown_group", field="group")
    return VersionPage(
        data=[version_read(version) for version in versions],
        next=versions[-1].id if len(versions) == query.limit else None,
    )


@router.get("/model_packages/{group}/{number}")
async def read_version(
    group: str, number: Annotated[int, Path(ge=1, lt=10**9)], principal: Caller, unit: Reading
) -> VersionRead:
    """Read one version."""
    return version_read(await find_version(unit, principal.project_id, f"{group}@{number}"))
