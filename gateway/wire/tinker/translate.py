"""This dialect's words for core things.

A *session* here is a client of the core; a *model* or *training run* is a session; a *sampling session* is a sampler.
The client numbers a model's requests from 1, and the creation of the model counts as 0; the core numbers a session's
operations from 1. So the creation is seq 1, and ``seq_id`` n is seq n + 1.
"""

from gateway.core.catalog import BaseModel, Catalog
from gateway.core.clients import Client, parse_session_address
from gateway.core.errors import Invalid, NotFound
from gateway.core.ids import ClientId, ProjectId, SessionId
from gateway.core.operations import MAX_SEQ
from gateway.core.ports import UnitOfWork
from gateway.core.sessions import Session
from gateway.core.versions import MAX_VERSION_TTL_S
from gateway.wire.tinker.schemas import OptimizerAsked

CREATION_SEQ = 1
ALPHA = 32.0  # the adapter's product is scaled by 32 / rank, whatever the rank
MIN_CHECKPOINT_TTL_S = 3600
SESSION_TTL_S = 24 * 3600  # of a session whose client says nothing more


def seq_of(seq_id: int) -> int:
    return seq_id + CREATION_SEQ


def check_seq(seq_id: int) -> int:
    """Return ``seq_id``, which must be a number that a client gives a request."""
    if not 1 <= seq_id < MAX_SEQ:
        raise Invalid(f"seq_id must be 1 to {MAX_SEQ - 1}, got {seq_id}", field="seq_id")
    return seq_id


async def find_client(unit: UnitOfWork, project_id: ProjectId, session_id: str) -> Client:
    """Return the client that this dialect's ``session_id`` means.

    Raises:
        NotFound: ``client_not_found``.
    """
    return await unit.clients.get(project_id, ClientId(session_id))


async def find_model(unit: UnitOfWork, project_id: ProjectId, model_id: str) -> Session:
    """Return the session that ``model_id`` means: a client's, by its address, or any other by its id.

    Raises:
        NotFound: ``unknown_session``.
    """
    seat = parse_session_address(model_id)
    try:
        if seat is None:
            return await unit.sessions.get(project_id, SessionId(model_id))
        found = await unit.sessions.by_seat(project_id, seat)
    except NotFound:
        found = None
    if found is None:
        raise NotFound("no such model", code="unknown_session", field="model_id")
    return found[0]


def find_base_model(catalog: Catalog, name: str) -> BaseModel:
    """Return the base model called ``name``; the directory it was loaded from is a name too.

    Raises:
        NotFound: ``unknown_base_model``.
    """
    by_directory = {str(model.path): model for model in catalog.models.values()}
    return by_directory.get(name.rstrip("/")) or catalog.get(name)


def check_optimizer(config: OptimizerAsked | None, *, field: str = "optimizer_config") -> None:
    """Raise unless the optimizer is the one there is.

    Raises:
        Invalid: ``unsupported_optimizer``.
    """
    if config is not None and config.type != "adamw":
        raise Invalid(
            f"{field}.type {config.type[:40]!r} is not offered here; adamw is",
            code="unsupported_optimizer",
            field=f"{field}.type",
        )


def check_ttl(ttl_s: int | None) -> int | None:
    """Return a checkpoint's time to live; None: for ever.

    Raises:
        Invalid: names both limits.
    """
    if ttl_s is not None and not MIN_CHECKPOINT_TTL_S <= ttl_s <= MAX_VERSION_TTL_S:
        raise Invalid(
            f"ttl_seconds must be {MIN_CHECKPOINT_TTL_S} (an hour) to {MAX_VERSION_TTL_S} (ten years), got {ttl_s}",
            field="ttl_seconds",
            details={"limit": MAX_VERSION_TTL_S, "got": ttl_s},
        )
    return ttl_s
