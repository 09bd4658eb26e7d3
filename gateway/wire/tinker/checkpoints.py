"""Checkpoints: named saves under ``tinker://<model>/<space>/<name>``, listed, described, kept and deleted.

A name in ``weights`` is a resumable state, one in ``sampler_weights`` an adapter to sample from, and one in
``external_weights`` an adapter to download. Saves without a name are reachable by their version's id.
"""

from dataclasses import replace
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import RedirectResponse

from gateway.core.addresses import Named, parse_address, tinker_path
from gateway.core.clock import Clock
from gateway.core.errors import Invalid, NotFound
from gateway.core.ids import ProjectId
from gateway.core.ports import UnitOfWork
from gateway.core.principals import Principal
from gateway.core.sessions import Session
from gateway.core.versions import Version, VersionFilter, VersionKind
from gateway.wire.deps import ArtifactsDep, Caller, ClockDep, DatabaseDep, Reading, TrainCaller, Writing
from gateway.wire.downloads import ARCHIVE, links_to, mounted_at
from gateway.wire.targets import find_version
from gateway.wire.tinker.listing_schemas import (
    CheckpointPage,
    CheckpointRead,
    Cursor,
    ExternalUrls,
    PageQuery,
    TtlAsked,
    WeightsInfoAsked,
    WeightsInfoTold,
)
from gateway.wire.tinker.routes import TinkerRoute
from gateway.wire.tinker.translate import find_model

router = APIRouter(route_class=TinkerRoute)

PUBLIC = "public"  # the tag of a version whose owner published its checkpoint
_TYPES: dict[str, Literal["training", "sampler", "external"]] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
Space = Annotated[Literal["weights", "sampler_weights", "external_weights"], Path()]


async def find_checkpoint(
    unit: UnitOfWork, project_id: ProjectId, path: str, *, at: datetime, sampling: bool, field: str = "path"
) -> Version:
    """Return the version that ``path`` names: one to sample from, or (``sampling`` false) one to train on.

    Raises:
        Invalid: not a path of that kind.
        NotFound: no such checkpoint, deleted, or expired.
    """
    wanted = "sampler_weights or external_weights" if sampling else "weights"
    if not isinstance(parse_address(path), Named):
        raise Invalid(f"{field} must be tinker://<model>/<{wanted}>/<name>", code="bad_path", field=field)
    version = await find_version(unit, project_id, path, field=field)
    version.require_present(at, field=field)
    if (version.kind is VersionKind.ADAPTER) is not sampling:
        raise Invalid(
            f"{field} must be of {wanted}: this checkpoint is of kind {version.kind}",
            code="wrong_version_kind",
            field=field,
        )
    return version


async def path_of(unit: UnitOfWork, version: Version) -> str:
    """Return the path of a version that a session saved."""
    session = await unit.sessions.get(version.project_id, version.session_id)
    return spelled(version, session)


def spelled(version: Version, session: Session) -> str:
    """Return the path of a ``session``'s version; a merged model goes by its address."""
    return tinker_path(version, session.address) or version.address


def checkpoint_read(version: Version, session: Session) -> CheckpointRead:
    path = spelled(version, session)
    _, _, _, space, name = path.split("/")
    return CheckpointRead(
        checkpoint_id=f"{space}/{name}",
        checkpoint_type=_TYPES[space],
        time=version.created_at,
        tinker_path=path,
        size_bytes=version.size_bytes,
        public=PUBLIC in version.labels.tags,
        user_metadata=dict(version.labels.user_metadata),
        expires_at=version.expires_at,
    )


async def _page(unit: UnitOfWork, project_id: ProjectId, wanted: VersionFilter, query: PageQuery) -> CheckpointPage:
    versions = await unit.versions.page(project_id, wanted, limit=query.limit, after=None, offset=query.offset)
    sessions = {id: await unit.sessions.get(project_id, id) for id in {version.session_id for version in versions}}
    return CheckpointPage(
        checkpoints=[
            checkpoint_read(version, sessions[version.session_id])
            for version in versions
            if version.kind is not VersionKind.MERGED
        ],
        cursor=Cursor(
            offset=query.offset, limit=query.limit, total_count=await unit.versions.count(project_id, wanted)
        ),
    )


@router.get("/checkpoints")
async def list_checkpoints(query: Annotated[PageQuery, Query()], principal: Caller, unit: Reading) -> CheckpointPage:
    """List the project's checkpoints, newest first."""
    return await _page(unit, principal.project_id, VersionFilter(named=True), query)


@router.get("/training_runs/{run_id}/checkpoints")
async def list_of_run(run_id: str, principal: Caller, unit: Reading) -> CheckpointPage:
    """List a model's checkpoints, newest first."""
    session = await find_model(unit, principal.project_id, run_id)
    wanted = VersionFilter(named=True, session_id=session.id)
    return await _page(unit, principal.project_id, wanted, PageQuery(limit=1000))


@router.post("/weights_info")
async def weights_info(body: WeightsInfoAsked, principal: Caller, clock: ClockDep, unit: Reading) -> WeightsInfoTold:
    """Say what a checkpoint was trained on, and which layers."""
    version = await find_version(unit, principal.project_id, body.tinker_path, field="tinker_path")
    version.require_present(clock.now(), field="tinker_path")
    lora = version.lora
    return WeightsInfoTold(
        base_model=version.base_model,
        lora_rank=lora.rank,
        train_unembed=lora.train_unembed,
        train_mlp=lora.train_mlp,
        train_attn=lora.train_attn,
    )


@router.get("/training_runs/{run_id}/checkpoints/external_weights/{name}/external_weights_urls")
async def external_urls(
    run_id: str,
    name: str,
    request: Request,
    principal: Caller,
    clock: ClockDep,
    database: DatabaseDep,
    artifacts: ArtifactsDep,
) -> ExternalUrls:
    """Return links to the files of a PEFT adapter; they need no key, and expire within the hour."""
    async with database.read() as unit:
        version = await _of_run(unit, principal.project_id, run_id, "external_weights", name)
    links = await links_to(version, artifacts, request.state.keyring, at=clock.now())
    return ExternalUrls(
        urls={name: _base(request) + links.paths[name] for name in links.files}, expires=links.expires_at
    )


@router.get("/training_runs/{run_id}/checkpoints/{space}/{name}/archive", status_code=302)
async def archive_url(
    run_id: str,
    space: Space,
    name: str,
    request: Request,
    principal: Caller,
    clock: ClockDep,
    database: DatabaseDep,
    artifacts: ArtifactsDep,
) -> Response:
    """Lead to the archive of an adapter, as older clients ask for it."""
    async with database.read() as unit:
        version = await _of_run(unit, principal.project_id, run_id, space, name)
    links = await links_to(version, artifacts, request.state.keyring, at=clock.now())
    expires = format_datetime(links.expires_at.astimezone(UTC), usegmt=True)
    return RedirectResponse(_base(request) + links.paths[ARCHIVE], status_code=302, headers={"Expires": expires})


def _base(request: Request) -> str:
    return f"{mounted_at(request)}/api/v1"


async def _of_run(unit: UnitOfWork, project_id: ProjectId, run_id: str, space: str, name: str) -> Version:
    version = await find_version(unit, project_id, f"tinker://{run_id}/{space}/{name}", field="checkpoint_id")
    if version.deleted_at is not None:
        raise NotFound("no such checkpoint", code="unknown_version", field="checkpoint_id")
    return version


@router.delete("/training_runs/{run_id}/checkpoints/{space}/{name}", status_code=204, response_class=Response)
async def delete_checkpoint(
    run_id: str, space: Space, name: str, principal: TrainCaller, clock: ClockDep, unit: Writing
) -> None:
    """Delete a checkpoint; what runs on it finishes first."""
    version = await _of_run(unit, principal.project_id, run_id, space, name)
    await unit.registry.delete(principal.project_id, version.id, force=True, by=principal.key_id, at=clock.now())


@router.put("/training_runs/{run_id}/checkpoints/{space}/{name}/ttl", status_code=204, response_class=Response)
async def set_ttl(
    run_id: str, space: Space, name: str, body: TtlAsked, principal: TrainCaller, clock: ClockDep, unit: Writing
) -> None:
    """Let a checkpoint expire so many seconds from now; null: never."""
    version = await _of_run(unit, principal.project_id, run_id, space, name)
    labels = replace(version.labels, ttl_s=body.ttl_seconds)
    await unit.registry.edit(principal.project_id, version.id, labels, by=principal.key_id, at=clock.now())


@router.post("/training_runs/{run_id}/checkpoints/{space}/{name}/publish", status_code=204, response_class=Response)
async def publish(run_id: str, space: Space, name: str, principal: TrainCaller, clock: ClockDep, unit: Writing) -> None:
    """Flag a checkpoint as public."""
    await _flag(unit, principal, clock, (run_id, space, name), public=True)


@router.delete("/training_runs/{run_id}/checkpoints/{space}/{name}/publish", status_code=204, response_class=Response)
async def unpublish(
    run_id: str, space: Space, name: str, principal: TrainCaller, clock: ClockDep, unit: Writing
) -> None:
    """Take the flag away."""
    await _flag(unit, principal, clock, (run_id, space, name), public=False)


async def _flag(
    unit: UnitOfWork, principal: Principal, clock: Clock, place: tuple[str, str, str], *, public: bool
) -> None:
    version = await _of_run(unit, principal.project_id, *place)
    tags = [tag for tag in version.labels.tags if tag != PUBLIC] + ([PUBLIC] if public else [])
    labels = replace(version.labels, tags=tuple(tags))
    await unit.registry.edit(principal.project_id, version.id, labels, by=principal.key_id, at=clock.now())
