"""WorkStore on SQL: the trainer's side of the log.

A trainer leases a session, not an operation (see ``leases``); every write is fenced by the lease's epoch.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, RowMapping, and_, exists, or_, select, update

from gateway.core.errors import Kind
from gateway.core.ids import OperationId, ProjectId, SessionId
from gateway.core.operations import Operation, Progress, Status
from gateway.core.payloads import OperationKind
from gateway.core.ports import Lease, Work
from gateway.core.results import Failure, LoadStateResult, OptimStepResult, Outcome, SaveResult
from gateway.core.sessions import OrderRule, SessionStatus, Snapshot
from gateway.core.usage import UsageFact
from gateway.core.versions import NewVersion
from gateway.store.blobs import SqlBlobStore
from gateway.store.leases import SqlLeaseStore, held_by, stale
from gateway.store.operation_rows import WINDOW_ENDING, discard_window, operation_of, record_outcome
from gateway.store.refusals import passed, refused_after, skipped
from gateway.store.sessions import end_session, read_session, settle_stop, used
from gateway.store.tables import LIVE, operations, sessions
from gateway.store.transaction import Transaction
from gateway.store.turns import line, take_turn
from gateway.store.usage import SqlUsageStore
from gateway.store.versions import register_version, save_result, version_of_operation

CLOCK_SLACK = timedelta(seconds=60)  # how far apart the clocks of processes may be
REPLAYED = (OperationKind.FORWARD_BACKWARD, *WINDOW_ENDING)


class SqlWorkStore(SqlLeaseStore):
    """WorkStore."""

    def __init__(self, transaction: Transaction) -> None:
        super().__init__(transaction)
        self._blobs = SqlBlobStore(transaction)
        self._usage = SqlUsageStore(transaction)

    async def claim(
        self, *, owner: str, base_model: str, lease_s: float, at: datetime, resident: Collection[SessionId] = ()
    ) -> Work | None:
        """As the port says. A stopping session only hands out again what a lost trainer left running."""
        while (session := await self._free_session(owner, base_model, lease_s, at)) is not None:
            operation = await self._ready_operation(session)
            if operation is not None:
                return await self._start(session, operation, owner, lease_s, at, begun=session["id"] in resident)
        return None

    async def _free_session(self, owner: str, base_model: str, lease_s: float, at: datetime) -> RowMapping | None:
        """A lease is over when it ran out; also when it ends later than any lease could: a clock was set back."""
        return await self._transaction.first(
            select(sessions)
            .where(
                and_(
                    sessions.c.base_model == base_model,
                    sessions.c.status.in_(LIVE),
                    or_(
                        sessions.c.lease_owner.is_(None),
                        sessions.c.lease_owner == owner,
                        sessions.c.lease_until <= at,
                        sessions.c.lease_until > at + timedelta(seconds=lease_s) + CLOCK_SLACK,
                    ),
                    exists(select(operations.c.id).where(_ready())),
                )
            )
            .order_by(*line(), sessions.c.served_at.asc().nulls_first(), sessions.c.created_at, sessions.c.id)
            .limit(1)
            .with_for_update(of=sessions, skip_locked=True, key_share=True)
        )

    async def _ready_operation(self, session: RowMapping) -> RowMapping | None:
        """Look again, now that the session is locked: what was ready may have been done meanwhile."""
        return await self._transaction.first(
            select(operations)
            .join(sessions, operations.c.session_id == sessions.c.id)
            .where(and_(sessions.c.id == session["id"], _ready()))
            .order_by(operations.c.seq)
            .limit(1)
        )

    async def _start(
        self, session: RowMapping, operation: RowMapping, owner: str, lease_s: float, at: datetime, *, begun: bool
    ) -> Work:
        """Lease and start. An operation that is handed out again to the trainer that holds it (whose first claim was
        not answered) was not lost."""
        held = session["lease_owner"] == owner and session["lease_until"] > at
        again = held and operation["status"] == Status.RUNNING and operation["attempts"] > 0
        lease = Lease(
            session_id=SessionId(session["id"]), owner=owner, epoch=session["epoch"] if held else session["epoch"] + 1
        )
        stopping = session["status"] == SessionStatus.STOPPING
        refused = await refused_after(self._transaction, session)
        await self._transaction.write(
            update(sessions)
            .where(sessions.c.id == lease.session_id)
            .values(
                status=(SessionStatus.STOPPING if stopping else SessionStatus.RUNNING).value,
                epoch=lease.epoch,
                lease_owner=owner,
                lease_until=at + timedelta(seconds=lease_s),
                served_at=at,
                window_broken_by=skipped(refused, operation["seq"], session["window_broken_by"]),
            )
        )
        if not again:
            await take_turn(self._transaction, session, operation["tokens"])
        losses = operation["attempts"] - again
        await self._transaction.write(
            update(operations)
            .where(operations.c.id == operation["id"])
            .values(
                status=Status.RUNNING.value,
                attempts=losses + (begun or again),
                started_at=operation["started_at"] or at,
                progress_done=None,
                progress_total=None,
            )
        )
        rows = await self._transaction.rows(select(operations).where(operations.c.id == operation["id"]))
        return Work(
            lease=lease,
            session=await read_session(self._transaction, lease.session_id),
            operation=operation_of(rows[0]),
            payload=await self._blobs.get_payload(ProjectId(operation["project_id"]), operation["payload_digest"]),
            losses=losses,
        )

    async def set_progress(self, lease: Lease, operation_id: OperationId, progress: Progress) -> None:
        """As the port says. Nobody is woken for it."""
        await self._transaction.write(
            update(operations)
            .where(
                and_(
                    operations.c.id == operation_id,
                    operations.c.status == Status.RUNNING,
                    exists(select(sessions.c.id).where(and_(held_by(lease), sessions.c.id == operations.c.session_id))),
                )
            )
            .values(progress_done=progress.done, progress_total=progress.total)
        )

    async def finish(
        self,
        lease: Lease,
        operation: Operation,
        outcome: Outcome,
        *,
        facts: Sequence[UsageFact],
        at: datetime,
    ) -> None:
        """As the port says. Reporting again what is recorded already is a no-op."""
        session = await self.fenced(lease)
        row = await self._unfinished(operation)
        if row is None:
            return
        await record_outcome(self._transaction, row, outcome, at)
        await self._usage.add(facts)
        broken_by = session["window_broken_by"]
        if operation.kind is OperationKind.FORWARD_BACKWARD and isinstance(outcome, Failure):
            broken_by = broken_by or operation.seq
        elif operation.kind in WINDOW_ENDING:
            if isinstance(outcome, Failure):
                await discard_window(self._transaction, lease.session_id, operation.seq)
            broken_by = None
        step = session["optimizer_step"]
        if isinstance(outcome, OptimStepResult | LoadStateResult):
            step = outcome.optimizer_step
        await self._advance(session, operation.seq, at, window_broken_by=broken_by, optimizer_step=step)

    async def stage(
        self, lease: Lease, operation: Operation, version: NewVersion, *, complete: bool, at: datetime
    ) -> SaveResult:
        """As the port says. Staging the same version again returns what is recorded already."""
        session = await self.fenced(lease)
        known = await version_of_operation(self._transaction, operation.id)
        if known is not None:
            return save_result(known)
        row = await self._unfinished(operation)
        if row is None:
            raise ValueError(f"operation {operation.id} is final and has no version")
        result = await register_version(self._transaction, row, version, at)
        if complete:
            await record_outcome(self._transaction, row, result, at)
        else:
            await self._transaction.write(update(operations).where(operations.c.id == operation.id).values(staged=True))
        await self._advance(session, operation.seq, at)
        return result

    async def snapshot_taken(self, lease: Lease, snapshot: Snapshot, *, made_with: Mapping[str, str]) -> None:
        changed = await self._transaction.write(
            update(sessions)
            .where(held_by(lease))
            .values(snapshot_seq=snapshot.seq, snapshot_location=snapshot.location, made_with=dict(made_with))
        )
        if not changed:
            raise stale(lease)

    async def fail_session(self, lease: Lease, reason: str, *, at: datetime) -> None:
        session = await self.fenced(lease)
        running = await self._transaction.first(
            select(operations).where(
                and_(
                    operations.c.session_id == lease.session_id,
                    operations.c.status == Status.RUNNING,
                    ~operations.c.staged,
                )
            )
        )
        if running is not None:
            await record_outcome(self._transaction, running, _session_failed(reason), at)
            await self._advance(session, running["seq"], at)
        await end_session(self._transaction, lease.session_id, SessionStatus.FAILED, at, failure=reason)

    async def completed_after(self, session_id: SessionId, seq: int) -> Sequence[Operation]:
        """As the port says. Left out are gradients that a failed optim_step or load_state threw away unused."""
        rows = await self._transaction.rows(
            select(operations)
            .where(
                and_(
                    operations.c.session_id == session_id,
                    operations.c.seq > seq,
                    operations.c.status == Status.COMPLETED,
                    operations.c.kind.in_(REPLAYED),
                    ~operations.c.window_discarded,
                )
            )
            .order_by(operations.c.seq)
        )
        return [operation_of(row) for row in rows]

    async def _unfinished(self, operation: Operation) -> RowMapping | None:
        """Return the row of a running operation, None when it is final or staged."""
        return await self._transaction.first(
            select(operations).where(
                and_(
                    operations.c.id == operation.id,
                    operations.c.status == Status.RUNNING,
                    ~operations.c.staged,
                )
            )
        )

    async def _advance(self, session: RowMapping, seq: int, at: datetime, **columns: Any) -> None:
        """Count ``seq`` as applied, with the refused ones after it; the session was used, and is stopped when it was
        only waiting for this."""
        applied_seq, broken_by = passed(
            await refused_after(self._transaction, session),
            max(session["applied_seq"], seq),
            columns.pop("window_broken_by", session["window_broken_by"]),
        )
        columns |= {"applied_seq": applied_seq, "window_broken_by": broken_by, **used(session["ttl_s"], at)}
        await self._transaction.write(update(sessions).where(sessions.c.id == session["id"]).values(**columns))
        await settle_stop(self._transaction, SessionId(session["id"]))
        self._transaction.announce()


def _ready() -> ColumnElement[bool]:
    """The operation (of the session in the enclosing query) that a trainer may run now."""
    return and_(
        operations.c.session_id == sessions.c.id,
        operations.c.seq > sessions.c.applied_seq,
        ~operations.c.staged,
        or_(
            operations.c.status == Status.RUNNING,
            and_(operations.c.status == Status.QUEUED, sessions.c.status != SessionStatus.STOPPING),
        ),
        or_(sessions.c.order_rule == OrderRule.ASCENDING, operations.c.seq == sessions.c.applied_seq + 1),
    )


def _session_failed(reason: str) -> Failure:
    return Failure(kind=Kind.INTERNAL, code="session_failed", message=f"the session failed: {reason}")
