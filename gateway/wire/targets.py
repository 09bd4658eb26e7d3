"""Which session and which exact version a request means. Shared by all dialects, so that they cannot differ.

Whatever does not exist and whatever belongs to another project give one and the same refusal. Nothing here ever falls
back to base weights.
"""

from gateway.core.addresses import LATEST, Aliased, ById, Named, Numbered, parse_address
from gateway.core.catalog import Catalog
from gateway.core.clients import Sampler, parse_session_address
from gateway.core.clock import Clock
from gateway.core.errors import Conflict, GatewayError, Invalid, Kind, NotFound, Unavailable
from gateway.core.ids import ProjectId, SessionId, VersionId
from gateway.core.ports import CorruptArtifact, Database, Engines, UnitOfWork
from gateway.core.results import Failure, SaveResult
from gateway.core.sampling import Target
from gateway.core.sessions import Session, SessionStatus
from gateway.core.versions import CanaryReport, Version, VersionKind, VersionState

SESSION_PREFIX = "sess-"
_LIVE = frozenset({SessionStatus.CREATING, SessionStatus.RUNNING})


def is_live(session: Session) -> bool:
    return session.status in _LIVE


def answer_headers(base_model: str, version: str | None, fingerprint: str) -> dict[str, str]:
    """Return the headers in which every answer names the exact weights that gave it."""
    return {"X-Loopline-Version": version or f"base:{base_model}", "X-Loopline-Fingerprint": fingerprint}


def headers_of(target: Target) -> dict[str, str]:
    """Return the same of a target that answers."""
    version = None if target.version is None else target.version.address
    return answer_headers(target.base.name, version, target.fingerprint)


async def find_session(unit: UnitOfWork, project_id: ProjectId, reference: str) -> Session:
    """Return the project's session with this id, name, or client's number (``client-...:train:n``).

    Raises:
        NotFound: ``unknown_session``.
    """
    seat = parse_session_address(reference)
    try:
        if seat is not None:
            seated = await unit.sessions.by_seat(project_id, seat)
            session = None if seated is None else seated[0]
        elif reference.startswith(SESSION_PREFIX):
            session = await unit.sessions.get(project_id, SessionId(reference))
        else:
            session = await unit.sessions.by_name(project_id, reference)
    except NotFound:
        session = None
    if session is None:
        raise NotFound("no such session", code="unknown_session", field="session_id")
    return session


async def find_version(
    unit: UnitOfWork,
    project_id: ProjectId,
    reference: str,
    *,
    kind: VersionKind | None = None,
    field: str = "version",
) -> Version:
    """Return the project's version that ``reference`` names in any of its spellings, deleted or not.

    ``kind`` says which versions ``latest`` chooses from.

    Raises:
        NotFound: ``unknown_version``.
    """
    try:
        match parse_address(reference):
            case ById(version_id):
                return await unit.versions.get(project_id, version_id)
            case Numbered(group, number):
                return await unit.versions.by_address(project_id, group, number)
            case Aliased(group, alias) if alias == LATEST:
                return await unit.versions.newest(project_id, group, kind)
            case Aliased(group, alias):
                return await unit.versions.by_alias(project_id, group, alias)
            case Named() as address:
                return await _named(unit, project_id, address)
            case None:
                pass
    except NotFound:
        pass
    raise NotFound("no such version", code="unknown_version", field=field)


async def _named(unit: UnitOfWork, project_id: ProjectId, address: Named) -> Version:
    """Raises NotFound."""
    session = await find_session(unit, project_id, address.session)
    version = await unit.versions.by_name(session.id, address.kind, address.name)
    if version is None:
        version = await unit.versions.get(project_id, VersionId(address.name))
    if (version.session_id, version.kind) != (session.id, address.kind):
        raise NotFound("no such version", code="unknown_version")
    return version


async def find_target(
    database: Database,
    engines: Engines,
    catalog: Catalog,
    clock: Clock,
    project_id: ProjectId,
    reference: str,
    *,
    field: str = "version",
) -> Target:
    """Return the version that ``reference`` names as something that can answer.

    A version that was saved lazily goes through the publish gate now, at its first use.

    Raises:
        NotFound: ``unknown_version``, ``version_deleted``, ``version_expired``, or its base model is no longer in the
            catalogue.
        Conflict: ``version_not_published``: not sampler weights, rejected, or not through the gate yet.
        Unavailable: no engine could judge it now.
    """
    async with database.read() as unit:
        version = await find_version(unit, project_id, reference, kind=VersionKind.ADAPTER, field=field)
        version.require_present(clock.now(), field=field)
        lazy = (
            version.kind is VersionKind.ADAPTER
            and version.state is VersionState.STAGED
            and (await unit.operations.get(project_id, version.operation_id)).final
        )
    base = catalog.get(version.base_model)
    if lazy:
        version = await _publish_now(database, engines, clock, version)
    if version.kind is not VersionKind.ADAPTER:
        raise Conflict(
            f"{version.address} is of kind {version.kind}; only a published adapter can answer",
            code="version_not_published",
            field=field,
        )
    if version.state is not VersionState.PUBLISHED:
        raise Conflict(
            f"{version.address} is {version.state}, not published", code="version_not_published", field=field
        )
    return Target(base=base, version=version)


async def _publish_now(database: Database, engines: Engines, clock: Clock, version: Version) -> Version:
    """Judge a staged version and record what was found; several callers at once record the same."""
    try:
        outcome: CanaryReport | Failure = await engines.publish(version)
    except Unavailable:
        raise
    except CorruptArtifact as error:
        outcome = Failure(kind=Kind.INTERNAL, code="corrupt_artifact", message=str(error))
    except GatewayError as error:
        outcome = Failure(kind=error.kind, code=error.code, message=error.message, details=error.details)
    async with database.write() as unit:
        current = await unit.versions.get(version.project_id, version.id)
        if current.state is not VersionState.STAGED:
            return current
        match outcome:
            case CanaryReport():
                await unit.versions.publish(version.id, outcome, at=clock.now())
            case Failure():
                await unit.versions.reject(version.id, outcome, at=clock.now())
        return await unit.versions.get(version.project_id, version.id)


async def session_target(
    database: Database,
    engines: Engines,
    catalog: Catalog,
    clock: Clock,
    session: Session,
    *,
    version: str | None = None,
    field: str = "version",
) -> Target:
    """Return what answers for ``session``: the pinned ``version``, or its latest published one.

    Raises:
        Conflict: ``session_not_running``, ``no_published_version``, ``version_not_published``.
        NotFound: the pinned version is unknown.
        Invalid: ``base_model_mismatch``, the pinned version was trained on another base model.
    """
    session.require_running()
    reference = version or session.latest_version_id
    if reference is None:
        raise Conflict(
            f"session {session.id} has no published version yet; save_weights first",
            code="no_published_version",
            field=field,
        )
    target = await find_target(database, engines, catalog, clock, session.project_id, reference, field=field)
    if target.base.name != session.base_model:
        raise Invalid(
            f"{reference} was trained on {target.base.name}, the session runs {session.base_model}",
            code="base_model_mismatch",
            field=field,
        )
    return target


async def sampler_target(
    database: Database, engines: Engines, catalog: Catalog, clock: Clock, sampler: Sampler
) -> Target:
    """Return what answers for ``sampler`` now.

    Raises:
        Conflict: ``save_not_completed``, ``no_published_version``, and as ``find_target``.
        NotFound, Unavailable: as ``find_target``.
    """
    reference = sampler.version_id
    async with database.read() as unit:
        if sampler.operation_id is not None:
            outcome = (await unit.operations.get(sampler.project_id, sampler.operation_id)).outcome
            if not isinstance(outcome, SaveResult):
                raise Conflict("the save that makes this sampler has not completed", code="save_not_completed")
            reference = outcome.version_id
        if sampler.session_id is not None:
            latest = (await unit.sessions.get(sampler.project_id, sampler.session_id)).latest_version_id
            reference = latest or reference
    if reference is None:
        return Target(base=catalog.get(sampler.base_model), version=None, asker=sampler.project_id)
    return await find_target(
        database, engines, catalog, clock, sampler.project_id, reference, field="sampling_session_id"
    )
