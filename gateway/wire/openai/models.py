"""GET /v1/models: what ``model`` can be."""

from collections.abc import AsyncGenerator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter

from gateway.core.addresses import parse_address
from gateway.core.catalog import BaseModel
from gateway.core.errors import NotFound
from gateway.core.ids import ProjectId
from gateway.core.ports import UnitOfWork
from gateway.core.sessions import Session
from gateway.core.versions import Version, VersionKind, VersionState
from gateway.wire.deps import CatalogDep, InferenceCaller, Reading
from gateway.wire.routes import DialectRoute
from gateway.wire.targets import find_session, find_version, is_live

router = APIRouter(route_class=DialectRoute, tags=["models"])

_PAGE = 200
_EPOCH = datetime.fromtimestamp(0, UTC)


@router.get("/models")
async def list_models(principal: InferenceCaller, catalog: CatalogDep, unit: Reading) -> dict[str, Any]:
    """List base models, the caller's live sessions with a published version, and of each model package group the newest
    published version and those with an alias. Others answer as well, by any of their names."""
    cards = [_base_card(model) for _, model in sorted(catalog.models.items())]
    cards += [_session_card(session) async for session in _sessions(unit, principal.project_id)]
    cards += [_version_card(version) async for version in _versions(unit, principal.project_id)]
    return {"object": "list", "data": cards}


@router.get("/models/{model:path}")
async def read_model(model: str, principal: InferenceCaller, catalog: CatalogDep, unit: Reading) -> dict[str, Any]:
    """Read one of them; a session also by its name."""
    if model in catalog.models:
        return _base_card(catalog.models[model])
    try:
        if parse_address(model) is not None:
            version = await find_version(unit, principal.project_id, model, kind=VersionKind.ADAPTER)
            if _answers(version):
                return _version_card(version)
        else:
            session = await find_session(unit, principal.project_id, model)
            if _serves(session):
                return {**_session_card(session), "id": model}
    except NotFound:
        pass
    raise NotFound("no such model, or not yours", code="model_not_found", field="model")


def _serves(session: Session) -> bool:
    return is_live(session) and session.latest_version_id is not None


def _answers(version: Version) -> bool:
    usable = version.kind is VersionKind.ADAPTER and version.state is VersionState.PUBLISHED
    return usable and version.deleted_at is None


async def _sessions(unit: UnitOfWork, project_id: ProjectId) -> AsyncGenerator[Session]:
    after = None
    while True:
        page = await unit.sessions.page(project_id, limit=_PAGE, after=after)
        for session in page:
            if _serves(session):
                yield session
        if len(page) < _PAGE:
            return
        after = page[-1].id


async def _versions(unit: UnitOfWork, project_id: ProjectId) -> AsyncGenerator[Version]:
    """Of each group the newest adapter and those with an alias: the list does not grow with every save."""
    for group in await unit.versions.groups(project_id):
        numbers = set(group.aliases.values())
        with suppress(NotFound):
            numbers.add((await unit.versions.newest(project_id, group.name, VersionKind.ADAPTER)).number)
        for number in sorted(numbers, reverse=True):
            version = await unit.versions.by_address(project_id, group.name, number)
            if _answers(version):
                yield version


def _card(model: str, created: datetime, **extra: Any) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": int(created.timestamp()), "owned_by": "loopline", **extra}


def _base_card(model: BaseModel) -> dict[str, Any]:
    return _card(model.name, _EPOCH, kind="base_model", base_model=model.name, max_model_len=model.context_length)


def _session_card(session: Session) -> dict[str, Any]:
    return _card(session.id, session.created_at, kind="session", base_model=session.base_model, name=session.name)


def _version_card(version: Version) -> dict[str, Any]:
    return _card(
        version.address,
        version.created_at,
        kind="version",
        base_model=version.base_model,
        session=version.session_id,
        fingerprint=version.fingerprint,
    )
