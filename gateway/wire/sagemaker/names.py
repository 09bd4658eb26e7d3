"""This dialect's names for core things.

A training session is a session, by its name or (where that is not of this alphabet) its id; a model package is a
version, a hub content a base model of the catalogue. Region and account of an ARN mean nothing here; all that are
written name one region and one account.
"""

import re
from functools import partial

from gateway.core.addresses import PARTITION, parse_address
from gateway.core.catalog import BaseModel, Catalog
from gateway.core.errors import Invalid, NotFound
from gateway.core.ids import ProjectId
from gateway.core.payloads import OperationKind
from gateway.core.ports import UnitOfWork
from gateway.core.sessions import Session, SessionStatus
from gateway.core.versions import GROUP_NAME, Version
from gateway.wire.targets import find_session, find_version
from gateway.wire.turns import Turn

HUB = "SageMakerPublicHub"
HUB_VERSION = "1.0.0"
_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", re.ASCII)
_STATUS = {
    SessionStatus.CREATING: "Running",  # anything else makes clients wait for ten seconds
    SessionStatus.RUNNING: "Running",
    SessionStatus.STOPPING: "Stopping",
    SessionStatus.STOPPED: "Stopped",
    SessionStatus.FAILED: "Failed",
    SessionStatus.EXPIRED: "Expired",
}


def status_of(session: Session) -> str:
    return _STATUS[session.status]


def name_of(session: Session) -> str:
    """Return what this dialect calls ``session``."""
    return session.name if session.name is not None and _NAME.fullmatch(session.name) else session.id


def session_arn(session: Session) -> str:
    return f"{PARTITION}:training-session/{name_of(session)}"


def group_arn(group: str) -> str:
    return f"{PARTITION}:model-package-group/{group}"


def hub_arn(model: BaseModel) -> str:
    """Return the ARN by which sessions name their base model."""
    return f"arn:aws:sagemaker:us-east-1:aws:hub-content/{HUB}/Model/{hub_name(model)}/{HUB_VERSION}"


def hub_name(model: BaseModel) -> str:
    """Return the name of the catalogue in this dialect's alphabet: other marks become dashes."""
    return re.sub(r"[^a-zA-Z0-9]+", "-", model.name).strip("-")[:63].strip("-")


def group_in(arn_or_name: str, *, field: str) -> str:
    """Return the group that an ARN or a name means.

    Raises:
        NotFound: neither can be one.
    """
    name = arn_or_name.rpartition("/")[2]
    if GROUP_NAME.fullmatch(name) is None:
        raise NotFound("no such model package group", code="unknown_group", field=field)
    return name


def find_hub_content(catalog: Catalog, name: str, *, field: str) -> BaseModel:
    """Return the base model that hub contents call ``name``.

    Raises:
        NotFound: ``unknown_base_model``.
    """
    for model in catalog.models.values():
        if hub_name(model).lower() == name.lower():
            return model
    known = ", ".join(sorted(map(hub_name, catalog.models.values()))) or "none"
    raise NotFound(f"no hub content {name[:80]!r}; available: {known}", code="unknown_base_model", field=field)


async def find_training_session(unit: UnitOfWork, project_id: ProjectId, name: str) -> Session:
    """Return the session that this dialect calls ``name``.

    Raises:
        NotFound: ``unknown_session``.
    """
    try:
        session = await find_session(unit, project_id, name)
    except NotFound:
        session = None
    if session is None or session.removed_at is not None:
        raise NotFound(f"no training session {name[:80]!r}", code="unknown_session", field="trainingSessionName")
    return session


async def find_package(unit: UnitOfWork, project_id: ProjectId, reference: str, *, field: str) -> Version:
    """Return the version that an ARN (or another spelling of its address) names, deleted or not.

    Raises:
        Invalid: it is the address of nothing that could be one.
        NotFound: ``unknown_version``.
    """
    if parse_address(reference) is None:
        raise Invalid(f"{field} must be the ARN of a model package, got {reference[:80]!r}", field=field)
    return await find_version(unit, project_id, reference, field=field)


def turn_of(session_name: str, seq: int, kind: OperationKind) -> Turn:
    return Turn(find=partial(find_training_session, name=session_name), seq=seq, kind=kind)
