"""Opening a session: the checks that come before it exists, and how it starts."""

import secrets
from collections.abc import Mapping
from datetime import datetime, timedelta

from gateway.core.catalog import BaseModel
from gateway.core.clients import Seat
from gateway.core.errors import Invalid
from gateway.core.ids import KeyId, ProjectId, new_session_id
from gateway.core.sessions import Activity, LoraConfig, OrderRule, Session, SessionStatus


def new_session(
    *,
    project_id: ProjectId,
    key_id: KeyId,
    model: BaseModel,
    lora: LoraConfig,
    order: OrderRule,
    at: datetime,
    name: str | None = None,
    group: str | None = None,
    ttl_s: int | None = None,
    user_metadata: Mapping[str, str] | None = None,
    seat: Seat | None = None,
    applied_seq: int = 0,
    trains: bool = True,
) -> Session:
    """Return a session that is ready for work. Its saves go to ``group``, or to a group named like its id.

    Whoever opens one that perhaps never ``trains`` checks its rank when work comes.

    Raises:
        Invalid: ``rank_too_large``.
    """
    if trains:
        check_rank(lora.rank, model)
    id = new_session_id()
    return Session(
        id=id,
        project_id=project_id,
        key_id=key_id,
        name=name,
        base_model=model.name,
        lora=lora,
        group=group or id,
        order=order,
        status=SessionStatus.RUNNING,
        activity=Activity.IDLE,
        created_at=at,
        last_used_at=at,
        ttl_s=ttl_s,
        expires_at=None if ttl_s is None else at + timedelta(seconds=ttl_s),
        user_metadata=user_metadata or {},
        applied_seq=applied_seq,
        optimizer_step=0,
        window_broken_by=None,
        snapshot=None,
        latest_version_id=None,
        failure=None,
        seat=seat,
    )


def check_rank(rank: int, model: BaseModel) -> None:
    """Raise unless the engines of ``model`` serve adapters of ``rank``."""
    if rank > model.max_lora_rank:
        raise Invalid(
            f"rank must be at most {model.max_lora_rank} on {model.name}, got {rank}",
            code="rank_too_large",
            field="lora.rank",
            details={"limit": model.max_lora_rank, "got": rank},
        )


def drawn_seed() -> int:
    """Return a seed for a session whose opener gave none."""
    return secrets.randbits(48)
