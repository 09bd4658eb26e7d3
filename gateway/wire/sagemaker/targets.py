"""Which weights answer for a session of this dialect.

A model package where one is named. Else the session's latest published version, as the API's model says; while no
operation has run in the session, the base model, as the SDK says. A session that has been trained and saved nothing
answers nothing: there would be no telling which weights were meant.
"""

from gateway.core.catalog import Catalog
from gateway.core.clock import Clock
from gateway.core.errors import Conflict
from gateway.core.ports import Database, Engines
from gateway.core.sampling import Target
from gateway.core.sessions import Session
from gateway.wire.sagemaker.names import find_package
from gateway.wire.targets import session_target


async def target_of(
    database: Database,
    engines: Engines,
    catalog: Catalog,
    clock: Clock,
    session: Session,
    package: str | None,
    *,
    field: str,
) -> Target:
    """Return what answers for ``session``, or for the model ``package`` that was named.

    Raises:
        Invalid, NotFound, Conflict, Unavailable: as ``find_package`` and ``session_target``.
    """
    session.require_running()
    if package is not None:
        async with database.read() as unit:
            package = (await find_package(unit, session.project_id, package, field=field)).id
    elif session.latest_version_id is None:
        if session.applied_seq == 0:
            return Target(base=catalog.get(session.base_model), version=None)
        raise Conflict(
            f"session {session.id} has been trained and has no published version: save its weights, or name a model "
            "package",
            code="no_published_version",
            field=field,
        )
    return await session_target(database, engines, catalog, clock, session, version=package, field=field)
