"""Model package groups and their versions: list, inspect, name, label, delete, bring back, verify.

A ``reference`` is a number of the group, an alias of it, or ``latest``.
"""

from dataclasses import replace
from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Query, Response

from gateway.core.addresses import check_alias
from gateway.core.errors import Conflict, Invalid, NotFound
from gateway.core.ids import SessionId, VersionId
from gateway.core.ports import UnitOfWork
from gateway.core.principals import Principal
from gateway.core.submission import check_labels
from gateway.core.versions import Version, VersionFilter, VersionKind, VersionState
from gateway.wire.deps import Caller, ClockDep, DatabaseDep, EnginesDep, Reading, TrainCaller, UndeleteWindow, Writing
from gateway.wire.native.schemas.base import PageQuery
from gateway.wire.native.schemas.model_packages import (
    AliasSet,
    EventList,
    GroupList,
    VerificationRead,
    VersionEdit,
    VersionPage,
    VersionRead,
    VersionsQuery,
)
from gateway.wire.native.versions_read import check_read, event_read, group_read, version_read, versions_read
from gateway.wire.routes import DialectRoute
from gateway.wire.targets import find_version

router = APIRouter(route_class=DialectRoute, tags=["model packages"])


@router.get("/model_packages")
async def list_groups(principal: Caller, unit: Reading) -> GroupList:
    """List the project's groups."""
    return GroupList(data=[group_read(group) for group in await unit.versions.groups(principal.project_id)])


@router.get("/versions")
async def list_versions(query: Annotated[VersionsQuery, Query()], principal: Caller, unit: Reading) -> VersionPage:
    """List versions of all groups, newest first."""
    return await _page(unit, principal, query, group=None)


@router.get("/versions/{address:path}")
async def read_address(address: str, principal: Caller, unit: Reading) -> VersionRead:
    """Read the version that an address names, in any spelling."""
    return await version_read(unit, await find_version(unit, principal.project_id, address, field="address"))


@router.get("/model_packages/{group}")
async def list_group(
    group: str, query: Annotated[VersionsQuery, Query()], principal: Caller, unit: Reading
) -> VersionPage:
    """List a group's versions, newest first."""
    page = await _page(unit, principal, query, group=group)
    if not page.data:
        await _require_group(unit, principal, group)
    return page


@router.get("/model_packages/{group}/history")
async def read_history(group: str, query: Annotated[PageQuery, Query()], principal: Caller, unit: Reading) -> EventList:
    """List what happened to a group's versions after they were saved, newest first."""
    await _require_group(unit, principal, group)
    events = await unit.registry.history(principal.project_id, group, limit=query.limit, after=query.after)
    return EventList(
        data=[event_read(group, event) for event in events],
        next=events[-1].id if len(events) == query.limit else None,
    )


@router.put("/model_packages/{group}/aliases/{alias}")
async def set_alias(
    group: str, alias: str, body: AliasSet, principal: TrainCaller, clock: ClockDep, unit: Writing
) -> VersionRead:
    """Let an alias name a version of the group, and no other from now on."""
    check_alias(alias)
    address = f"{group}@{body.version}" if isinstance(body.version, int) else body.version
    version = await find_version(unit, principal.project_id, address)
    if version.group != group:
        raise Invalid(f"{version.address} is not of group {group[:63]}", code="wrong_group", field="version")
    version = await unit.registry.set_alias(
        principal.project_id, version.id, alias, by=principal.key_id, at=clock.now()
    )
    return await version_read(unit, version)


@router.delete("/model_packages/{group}/aliases/{alias}", status_code=204)
async def drop_alias(group: str, alias: str, principal: TrainCaller, clock: ClockDep, unit: Writing) -> Response:
    """Take an alias away; the version stays."""
    await unit.registry.drop_alias(principal.project_id, group, alias, by=principal.key_id, at=clock.now())
    return Response(status_code=204)


@router.get("/model_packages/{group}/{reference}")
async def read_version(group: str, reference: str, principal: Caller, unit: Reading) -> VersionRead:
    """Read one version."""
    return await version_read(unit, await of_group(unit, principal, group, reference))


@router.patch("/model_packages/{group}/{reference}")
async def edit_version(
    group: str, reference: str, body: VersionEdit, principal: TrainCaller, clock: ClockDep, unit: Writing
) -> VersionRead:
    """Change description, metadata, tags or time to live."""
    version = await of_group(unit, principal, group, reference)
    before = version.labels
    labels = replace(
        before,
        description=before.description if body.description is None else body.description,
        user_metadata=before.user_metadata if body.user_metadata is None else body.user_metadata,
        tags=before.tags if body.tags is None else tuple(sorted(body.tags)),
        ttl_s=body.ttl_seconds if "ttl_seconds" in body.model_fields_set else before.ttl_s,
    )
    check_labels(labels)
    edited = await unit.registry.edit(principal.project_id, version.id, labels, by=principal.key_id, at=clock.now())
    return await version_read(unit, edited)


@router.delete("/model_packages/{group}/{reference}")
async def delete_version(
    group: str, reference: str, principal: TrainCaller, clock: ClockDep, unit: Writing, *, force: bool = False
) -> VersionRead:
    """Delete a version: requests that run finish, new ones are refused. It can be brought back for a while."""
    version = await of_group(unit, principal, group, reference)
    deleted = await unit.registry.delete(
        principal.project_id, version.id, force=force, by=principal.key_id, at=clock.now()
    )
    return await version_read(unit, deleted)


@router.post("/model_packages/{group}/{reference}/undelete")
async def undelete_version(
    group: str, reference: str, principal: TrainCaller, clock: ClockDep, window: UndeleteWindow, unit: Writing
) -> VersionRead:
    """Bring a deleted or expired version back."""
    version = await of_group(unit, principal, group, reference)
    kept = await unit.registry.undelete(
        principal.project_id, version.id, window=timedelta(seconds=window), by=principal.key_id, at=clock.now()
    )
    return await version_read(unit, kept)


@router.post("/model_packages/{group}/{reference}/verify")
async def verify_version(
    group: str,
    reference: str,
    principal: TrainCaller,
    clock: ClockDep,
    database: DatabaseDep,
    engines: EnginesDep,
) -> VerificationRead:
    """Take a published adapter through the gate again, on every engine, and answer what it measured."""
    async with database.read() as unit:
        version = await of_group(unit, principal, group, reference)
    version.require_present(clock.now())
    if version.kind is not VersionKind.ADAPTER or version.state is not VersionState.PUBLISHED:
        raise Conflict(
            f"{version.address} is a {version.state} {version.kind}; only a published adapter can be verified",
            code="version_not_published",
            field="version",
        )
    checks = await engines.verify(version)
    return VerificationRead(
        version=version.address,
        passed=all(check.report is not None for check in checks),
        checks=[check_read(check) for check in checks],
    )


async def of_group(unit: UnitOfWork, principal: Principal, group: str, reference: str) -> Version:
    """Raises NotFound: ``unknown_version``."""
    return await find_version(unit, principal.project_id, f"{group}@{reference}")


async def _page(unit: UnitOfWork, principal: Principal, query: VersionsQuery, *, group: str | None) -> VersionPage:
    wanted = VersionFilter(
        group=group,
        kind=None if query.kind is None else VersionKind(query.kind),
        state=None if query.state is None else VersionState(query.state),
        session_id=None if query.session_id is None else SessionId(query.session_id),
        tag=query.tag,
        deleted=query.deleted,
    )
    after = None if query.after is None else VersionId(query.after)
    versions = await unit.versions.page(principal.project_id, wanted, limit=query.limit, after=after)
    return VersionPage(
        data=await versions_read(unit, versions), next=versions[-1].id if len(versions) == query.limit else None
    )


async def _require_group(unit: UnitOfWork, principal: Principal, group: str) -> None:
    if group not in {known.name for known in await unit.versions.groups(principal.project_id)}:
        raise NotFound("no such model package group", code="unknown_group", field="group")
