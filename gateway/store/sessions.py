"""SessionStore on SQL, and what other stores do to a session's row."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, RowMapping, Select, and_, bindparam, case, exists, func, or_, select, update

from gateway.core.clients import Seat
from gateway.core.errors import Conflict, Unavailable
from gateway.core.ids import ClientId, KeyId, ProjectId, SessionId, VersionId
from gateway.core.limits import Limit
from gateway.core.operations import Status
from gateway.core.ports import LimitStore
from gateway.core.sessions import (
    Activity,
    ComputeRules,
    LoraConfig,
    OrderRule,
    Recovery,
    Session,
    SessionStatus,
    Snapshot,
)
from gateway.store.blobs import KEPT
from gateway.store.keys_used import free_key
from gateway.store.lora import lora_columns, lora_of
from gateway.store.tables import LIVE, operations, sessions
from gateway.store.text import missing, require_id, require_storable, storable
from gateway.store.transaction import Transaction

ACCEPTING = (SessionStatus.CREATING, SessionStatus.RUNNING)
OPEN = (Status.QUEUED, Status.RUNNING)
_LISTED = sessions.c.removed_at.is_(None)


class SqlSessionStore:
    """SessionStore."""

    def __init__(self, transaction: Transaction, limits: LimitStore) -> None:
        self._transaction = transaction
        self._limits = limits

    async def add(self, session: Session, *, idempotency_key: str | None, request_digest: str) -> None:
        for text, field in ((session.name, "name"), (idempotency_key, "Idempotency-Key")):
            require_storable(text, field)
        for label, value in session.user_metadata.items():
            require_storable(label + value, "user_metadata")
        await self._limits.require_room(session.project_id, session.key_id, Limit.SESSIONS)
        row = {
            "id": session.id,
            "project_id": session.project_id,
            "key_id": session.key_id,
            "name": session.name,
            "base_model": session.base_model,
            **lora_columns(session.lora),
            "group_name": session.group,
            "order_rule": session.order.value,
            "status": session.status.value,
            "recovering": session.activity is Activity.RECOVERING,
            "created_at": session.created_at,
            "last_used_at": session.last_used_at,
            "ttl_s": session.ttl_s,
            "expires_at": session.expires_at,
            "user_metadata": dict(session.user_metadata),
            "applied_seq": session.applied_seq,
            "optimizer_step": session.optimizer_step,
            "window_broken_by": session.window_broken_by,
            "snapshot_seq": session.snapshot.seq if session.snapshot else None,
            "snapshot_location": session.snapshot.location if session.snapshot else None,
            "latest_version_id": session.latest_version_id,
            "failure": session.failure,
            "idempotency_key": idempotency_key,
            "request_digest": request_digest,
            "epoch": 0,
            "client_id": session.seat.client_id if session.seat else None,
            "client_number": session.seat.number if session.seat else None,
        }
        if idempotency_key is not None:
            await free_key(self._transaction, sessions, session.project_id, idempotency_key)
        if not await self._transaction.insert_new(sessions, row):
            raise await self._why_not(session, idempotency_key)
        self._transaction.announce()

    async def _why_not(self, session: Session, idempotency_key: str | None) -> Conflict | Unavailable:
        if session.seat is not None and await self.by_seat(session.project_id, session.seat):
            return Unavailable("this session is just being opened; try again", code="request_in_progress")
        if idempotency_key is not None and await self.by_idempotency_key(session.project_id, idempotency_key):
            return Unavailable(
                "a session is just being created with this Idempotency-Key; try again", code="request_in_progress"
            )
        return Conflict(
            f"the project already has a live session named {session.name!r}", code="session_name_taken", field="name"
        )

    async def by_idempotency_key(self, project_id: ProjectId, key: str) -> tuple[Session, str] | None:
        if not storable(key):
            return None
        row = await self._transaction.first(
            _select().where(
                and_(
                    sessions.c.project_id == project_id,
                    sessions.c.idempotency_key == key,
                    sessions.c.created_at > self._transaction.clock.now() - KEPT,
                )
            )
        )
        return None if row is None else (session_of(row), row["request_digest"])

    async def get(self, project_id: ProjectId, session_id: SessionId) -> Session:
        require_id(session_id, "session")
        row = await self._transaction.first(_OWN, {"session": session_id, "project": project_id})
        if row is None:
            raise missing("session", session_id)
        return session_of(row)

    async def by_name(self, project_id: ProjectId, name: str) -> Session | None:
        if not storable(name):
            return None
        row = await self._transaction.first(
            _select()
            .where(and_(sessions.c.project_id == project_id, sessions.c.name == name, _LISTED))
            .order_by(
                case((sessions.c.status.in_(LIVE), 0), else_=1), sessions.c.created_at.desc(), sessions.c.id.desc()
            )
            .limit(1)
        )
        return None if row is None else session_of(row)

    async def by_seat(self, project_id: ProjectId, seat: Seat) -> tuple[Session, str] | None:
        row = await self._transaction.first(
            _select().where(
                and_(
                    sessions.c.project_id == project_id,
                    sessions.c.client_id == seat.client_id,
                    sessions.c.client_number == seat.number,
                )
            )
        )
        return None if row is None else (session_of(row), row["request_digest"])

    async def of_client(self, project_id: ProjectId, client_id: ClientId) -> Sequence[Session]:
        query = _select().where(and_(sessions.c.project_id == project_id, sessions.c.client_id == client_id))
        return [session_of(row) for row in await self._transaction.rows(query.order_by(sessions.c.client_number))]

    async def count(self, project_id: ProjectId) -> int:
        rows = await self._transaction.rows(
            select(func.count().label("all"))
            .select_from(sessions)
            .where(and_(sessions.c.project_id == project_id, _LISTED))
        )
        return rows[0]["all"]

    async def page(
        self, project_id: ProjectId, *, limit: int, after: SessionId | None, offset: int = 0
    ) -> Sequence[Session]:
        query = _select().where(and_(sessions.c.project_id == project_id, _LISTED))
        if after is not None:
            last = await self.get(project_id, after)
            query = query.where(
                or_(
                    sessions.c.created_at < last.created_at,
                    and_(sessions.c.created_at == last.created_at, sessions.c.id < last.id),
                )
            )
        query = query.order_by(sessions.c.created_at.desc(), sessions.c.id.desc()).limit(limit).offset(offset)
        return [session_of(row) for row in await self._transaction.rows(query)]

    async def touch(self, session_id: SessionId, at: datetime) -> None:
        row = await self._transaction.first(select(sessions.c.ttl_s).where(sessions.c.id == session_id))
        if row is not None:
            await self._transaction.write(
                update(sessions)
                .where(and_(sessions.c.id == session_id, sessions.c.last_used_at < at))
                .values(**used(row["ttl_s"], at))
            )

    async def stop(self, project_id: ProjectId, session_id: SessionId, at: datetime) -> Session:
        session = await self.get(project_id, session_id)
        row = await lock_session(self._transaction, session_id)
        if row["status"] in ACCEPTING:
            await skip_queued(self._transaction, session_id, at)
            await self._transaction.write(
                update(sessions).where(sessions.c.id == session_id).values(status=SessionStatus.STOPPING.value)
            )
            await settle_stop(self._transaction, session_id)
            self._transaction.announce()
        return await self.get(project_id, session.id)

    async def remove(self, project_id: ProjectId, session_id: SessionId, at: datetime) -> None:
        session = await self.get(project_id, session_id)
        row = await lock_session(self._transaction, session_id)
        if row["status"] in LIVE:
            raise Conflict(
                f"session {session.id} is {row['status']}; stop it first", code="session_running", field="session_id"
            )
        await self._transaction.write(
            update(sessions).where(and_(sessions.c.id == session_id, _LISTED)).values(removed_at=at)
        )

    async def adopt(self, session_id: SessionId, lora: LoraConfig) -> Session:
        await self._transaction.write(update(sessions).where(sessions.c.id == session_id).values(**lora_columns(lora)))
        return await read_session(self._transaction, session_id)

    async def expire_due(self, at: datetime) -> Sequence[SessionId]:
        """As the port says. A session whose operation is running is in use: it is left for a later call."""
        rows = await self._transaction.rows(
            select(sessions.c.id)
            .where(and_(sessions.c.status.in_(ACCEPTING), sessions.c.expires_at <= at, ~_has_operation(Status.RUNNING)))
            .order_by(sessions.c.id)
            .with_for_update(of=sessions, skip_locked=True, key_share=True)
        )
        expired: list[SessionId] = []
        for row in rows:
            running = await self._transaction.first(
                select(operations.c.id).where(
                    and_(operations.c.session_id == row["id"], operations.c.status == Status.RUNNING)
                )
            )
            if running is None:
                await end_session(self._transaction, row["id"], SessionStatus.EXPIRED, at)
                expired.append(SessionId(row["id"]))
        return expired


def session_of(row: RowMapping) -> Session:
    """Read a row of ``sessions`` with the computed column ``working``."""
    status = SessionStatus(row["status"])
    activity = Activity.IDLE
    if status in LIVE and row["recovering"]:
        activity = Activity.RECOVERING
    elif row["working"]:
        activity = Activity.ACTIVE
    return Session(
        id=SessionId(row["id"]),
        project_id=ProjectId(row["project_id"]),
        key_id=KeyId(row["key_id"]),
        name=row["name"],
        base_model=row["base_model"],
        lora=lora_of(row),
        group=row["group_name"],
        order=OrderRule(row["order_rule"]),
        status=status,
        activity=activity,
        created_at=row["created_at"],
        last_used_at=row["last_used_at"],
        ttl_s=row["ttl_s"],
        expires_at=row["expires_at"],
        user_metadata=row["user_metadata"],
        applied_seq=row["applied_seq"],
        optimizer_step=row["optimizer_step"],
        window_broken_by=row["window_broken_by"],
        snapshot=None
        if row["snapshot_seq"] is None
        else Snapshot(seq=row["snapshot_seq"], location=row["snapshot_location"]),
        latest_version_id=None if row["latest_version_id"] is None else VersionId(row["latest_version_id"]),
        failure=row["failure"],
        recovery=_recovery_of(row) if activity is Activity.RECOVERING else None,
        rules=None if row["compute_rules"] is None else ComputeRules(**row["compute_rules"]),
        made_with=row["made_with"],
        replay_note=row["replay_note"],
        seat=None
        if row["client_id"] is None
        else Seat(client_id=ClientId(row["client_id"]), number=row["client_number"]),
        removed_at=row["removed_at"],
    )


def _recovery_of(row: RowMapping) -> Recovery:
    return Recovery(seq=row["recovered_seq"] or 0, losses=row["recovery_losses"] or 0)


async def read_session(transaction: Transaction, session_id: SessionId) -> Session:
    """Return a session that is known to exist."""
    return session_of((await transaction.rows(_ONE, {"session": session_id}))[0])


async def lock_session(transaction: Transaction, session_id: SessionId) -> RowMapping:
    """Lock the session's row until the end of the transaction: whoever decides on its operations does so alone.

    Every transaction that locks more than this locks the session first.
    """
    row = await transaction.first(_LOCKED, {"session": session_id})
    if row is None:
        raise missing("session", session_id)
    return row


async def mark_used(transaction: Transaction, session_id: SessionId, ttl_s: int | None, at: datetime) -> None:
    """Record that a locked session was used."""
    await transaction.write(_USED, {"session": session_id, **used(ttl_s, at)})


async def skip_queued(transaction: Transaction, session_id: SessionId, at: datetime) -> None:
    """Skip what a locked session has queued."""
    await transaction.write(
        update(operations)
        .where(and_(operations.c.session_id == session_id, operations.c.status == Status.QUEUED))
        .values(status=Status.SKIPPED.value, finished_at=at)
    )


async def settle_stop(transaction: Transaction, session_id: SessionId) -> None:
    """Move a locked session from stopping to stopped when none of its operations runs any more."""
    await transaction.write(
        update(sessions)
        .where(
            and_(
                sessions.c.id == session_id,
                sessions.c.status == SessionStatus.STOPPING,
                ~_has_operation(Status.RUNNING),
            )
        )
        .values(status=SessionStatus.STOPPED.value, **released())
    )


async def end_session(
    transaction: Transaction, session_id: SessionId, status: SessionStatus, at: datetime, failure: str | None = None
) -> None:
    """Give a locked session its last status, skip what it has queued, and take it from its trainer."""
    await skip_queued(transaction, session_id, at)
    await transaction.write(
        update(sessions).where(sessions.c.id == session_id).values(status=status.value, failure=failure, **released())
    )
    transaction.announce()


def used(ttl_s: int | None, at: datetime) -> dict[str, Any]:
    """Return the columns that record a use at ``at``."""
    return {"last_used_at": at, "expires_at": None if ttl_s is None else at + timedelta(seconds=ttl_s)}


def released() -> dict[str, Any]:
    """Return the columns of a session that no trainer holds."""
    return {
        "lease_owner": None,
        "lease_until": None,
        "recovering": False,
        "recovered_seq": None,
        "recovery_losses": None,
    }


def _has_operation(*statuses: Status) -> ColumnElement[bool]:
    return exists(
        select(operations.c.id).where(and_(operations.c.session_id == sessions.c.id, operations.c.status.in_(statuses)))
    )


def _select() -> Select[Any]:
    return select(sessions, _has_operation(*OPEN).label("working"))


# Asked with every operation, so built once.
_ONE = _select().where(sessions.c.id == bindparam("session"))
_OWN = _ONE.where(sessions.c.project_id == bindparam("project"))
_LOCKED = select(sessions).where(sessions.c.id == bindparam("session")).with_for_update(key_share=True)
_USED = (
    update(sessions)
    .where(sessions.c.id == bindparam("session"))
    .values({name: bindparam(name) for name in ("last_used_at", "expires_at")})
)
