"""OperationStore on SQL: the operation log as reorder buffer, retry table and result store.

Whoever appends locks the session first: numbers are handed out once, and a stop cannot slip in between.
"""

import itertools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, RowMapping, Select, and_, exists, func, select, update

from gateway.core.codec import decode_outcome, encode_outcome
from gateway.core.errors import Conflict, Invalid, Kind, SequenceReused
from gateway.core.ids import KeyId, OperationId, ProjectId, SessionId, new_operation_id
from gateway.core.operations import FINAL, MAX_SEQ, Operation, Progress, Status
from gateway.core.payloads import OperationKind, Payload, kind_of
from gateway.core.results import Failure, Outcome
from gateway.core.sessions import OrderRule, Session
from gateway.store.blobs import SqlBlobStore
from gateway.store.sessions import ACCEPTING, OPEN, lock_session, read_session, used
from gateway.store.tables import operations, sessions
from gateway.store.text import missing, require_id, require_storable, storable
from gateway.store.transaction import Transaction

WINDOW_ENDING = (OperationKind.OPTIM_STEP, OperationKind.LOAD_STATE)  # also when they fail
_IDS_PER_QUERY = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a queued operation stands: how many come before it, and the lowest missing seq that holds it back."""

    position: int
    missing_seq: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A session's unfinished operations in order."""

    order: OrderRule
    applied_seq: int
    waiting: Sequence[int]  # seqs above applied_seq, ascending

    def place(self, seq: int) -> Place:
        position = bisect_left(self.waiting, seq)
        if self.order is OrderRule.ASCENDING or position == seq - self.applied_seq - 1:
            return Place(position=position, missing_seq=None)
        expected = itertools.count(self.applied_seq + 1)
        present = itertools.chain(self.waiting[:position], [seq])
        return Place(position=position, missing_seq=next(e for e, p in zip(expected, present) if e != p))  # noqa: B905


class SqlOperationStore:
    """OperationStore."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._blobs = SqlBlobStore(transaction)

    async def add(
        self,
        *,
        session: Session,
        key_id: KeyId,
        seq: int | None,
        payload: Payload,
        digest: str,
        idempotency_key: str | None,
    ) -> Operation:
        """As the port says. Of two writers that add the same, both get the one row.

        Raises:
            SequenceReused: ``seq`` was taken meanwhile by other content.
            Conflict: the session stopped meanwhile, or passed ``seq``; the idempotency key was used elsewhere.
            Invalid: the session has no number left.
        """
        require_storable(idempotency_key, "Idempotency-Key")
        locked = await lock_session(self._transaction, session.id)
        known = await self._known(session, seq, digest, idempotency_key)
        if known is not None:
            return known
        if locked["status"] not in ACCEPTING:
            (await read_session(self._transaction, session.id)).require_running()
        if seq is None:
            seq = await self._next_seq(session.id, locked["applied_seq"])
        elif seq <= locked["applied_seq"]:
            raise Conflict(
                f"seq {seq} was given up: the session already applied {locked['applied_seq']}",
                code="sequence_passed",
                field="seq",
            )
        now, id = self._transaction.clock.now(), new_operation_id()
        row = {
            "id": id,
            "session_id": session.id,
            "project_id": session.project_id,
            "key_id": key_id,
            "seq": seq,
            "kind": kind_of(payload).value,
            "status": Status.QUEUED.value,
            "staged": False,
            "payload_digest": digest,
            "idempotency_key": idempotency_key,
            "attempts": 0,
            "created_at": now,
            "window_discarded": False,
        }
        if not await self._transaction.insert_new(operations, row):
            # Only the idempotency key can clash: the session is locked. Another session has it.
            raise _key_reused()
        await self._transaction.write(
            update(sessions).where(sessions.c.id == session.id).values(**used(locked["ttl_s"], now))
        )
        self._transaction.announce()
        place = await self._place(session.id, locked["order_rule"], locked["applied_seq"], seq)
        return operation_of({**row, "started_at": None, "finished_at": None}, place=place)

    async def _known(
        self, session: Session, seq: int | None, digest: str, idempotency_key: str | None
    ) -> Operation | None:
        if idempotency_key is not None:
            known = await self.by_idempotency_key(session.project_id, idempotency_key)
            if known is not None:
                if known.session_id != session.id or known.payload_digest != digest or seq not in (None, known.seq):
                    raise _key_reused()
                return known
        if seq is not None:
            known = await self.by_seq(session.id, seq)
            if known is not None:
                if known.payload_digest != digest:
                    raise SequenceReused(session.id, seq)
                return known
        return None

    async def _next_seq(self, session_id: SessionId, applied_seq: int) -> int:
        rows = await self._transaction.rows(
            select(func.max(operations.c.seq).label("highest")).where(operations.c.session_id == session_id)
        )
        seq = max(rows[0]["highest"] or 0, applied_seq) + 1
        if seq > MAX_SEQ:
            raise Invalid(f"the session has used the highest seq there is, {MAX_SEQ}", field="seq")
        return seq

    async def get(self, project_id: ProjectId, operation_id: OperationId) -> Operation:
        require_id(operation_id, "operation")
        found = await self._one(
            _select().where(and_(operations.c.id == operation_id, operations.c.project_id == project_id))
        )
        if found is None:
            raise missing("operation", operation_id)
        return found

    async def by_seq(self, session_id: SessionId, seq: int) -> Operation | None:
        return await self._one(_select().where(and_(operations.c.session_id == session_id, operations.c.seq == seq)))

    async def by_idempotency_key(self, project_id: ProjectId, key: str) -> Operation | None:
        if not storable(key):
            return None
        return await self._one(
            _select().where(and_(operations.c.project_id == project_id, operations.c.idempotency_key == key))
        )

    async def page(
        self, project_id: ProjectId, session_id: SessionId, *, limit: int, after_seq: int
    ) -> Sequence[Operation]:
        rows = await self._transaction.rows(
            _select()
            .where(
                and_(
                    operations.c.session_id == session_id,
                    operations.c.project_id == project_id,
                    operations.c.seq > after_seq,
                )
            )
            .order_by(operations.c.seq)
            .limit(limit)
        )
        if not rows:
            return []
        last = rows[-1]
        line = await self._line(session_id, last["order_rule"], last["applied_seq"], last["seq"])
        return [operation_of(row, place=line.place(row["seq"])) for row in rows]

    async def final_among(self, ids: Sequence[OperationId]) -> Sequence[OperationId]:
        final: list[OperationId] = []
        for start in range(0, len(ids), _IDS_PER_QUERY):
            rows = await self._transaction.rows(
                select(operations.c.id).where(
                    and_(
                        operations.c.id.in_(ids[start : start + _IDS_PER_QUERY]),
                        operations.c.status.in_(sorted(FINAL)),
                    )
                )
            )
            final += [OperationId(row["id"]) for row in rows]
        return final

    async def fail_gaps(self, *, older_than: datetime) -> Sequence[OperationId]:
        """As the port says. The missing seq is given up (a late one is refused), and as nobody knows what it held,
        the gradient window counts as incomplete: the next optim_step fails instead of stepping on a part. One that
        fails here is that next one, and ends the window.
        """
        rows = await self._transaction.rows(
            select(sessions.c.id)
            .where(
                and_(
                    sessions.c.order_rule == OrderRule.STRICT,
                    sessions.c.status.in_(ACCEPTING),
                    ~_has_next_operation(),
                    sessions.c.id.in_(
                        select(operations.c.session_id).where(
                            and_(operations.c.status == Status.QUEUED, operations.c.created_at < older_than)
                        )
                    ),
                )
            )
            .order_by(sessions.c.id)
            .with_for_update(of=sessions, skip_locked=True, key_share=True)
        )
        failed: list[OperationId] = []
        for row in rows:
            failed += await self._fail_gaps_of(row["id"], older_than)
        return failed

    async def _fail_gaps_of(self, session_id: SessionId, older_than: datetime) -> list[OperationId]:
        session = (await self._transaction.rows(select(sessions).where(sessions.c.id == session_id)))[0]
        waiting = await self._transaction.rows(
            select(operations)
            .where(and_(operations.c.session_id == session_id, operations.c.status.in_(OPEN), ~operations.c.staged))
            .order_by(operations.c.seq)
        )
        applied_seq, broken_by = session["applied_seq"], session["window_broken_by"]
        missing_seq: int | None = None
        failed: list[OperationId] = []
        for index, row in enumerate(waiting):
            if row["seq"] > applied_seq + 1:
                if not any(later["created_at"] < older_than for later in waiting[index:]):
                    break
                missing_seq = applied_seq + 1
                broken_by = broken_by or missing_seq
                applied_seq = row["seq"] - 1
            if missing_seq is None or row["created_at"] >= older_than:
                break
            await record_outcome(
                self._transaction, row, _never_arrived(row["seq"], missing_seq), self._transaction.clock.now()
            )
            if row["kind"] in WINDOW_ENDING:
                broken_by = None
                await discard_window(self._transaction, session_id, row["seq"])
            applied_seq = row["seq"]
            failed.append(OperationId(row["id"]))
        if missing_seq is not None:
            await self._transaction.write(
                update(sessions)
                .where(sessions.c.id == session_id)
                .values(applied_seq=applied_seq, window_broken_by=broken_by)
            )
            self._transaction.announce()
        return failed

    async def _one(self, query: Select[Any]) -> Operation | None:
        row = await self._transaction.first(query)
        if row is None:
            return None
        outcome = None
        if row["outcome_digest"] is not None:
            outcome = decode_outcome(await self._blobs.get(ProjectId(row["project_id"]), row["outcome_digest"]))
        place = None
        if row["status"] == Status.QUEUED:
            place = await self._place(SessionId(row["session_id"]), row["order_rule"], row["applied_seq"], row["seq"])
        return operation_of(row, place=place, outcome=outcome)

    async def _place(self, session_id: SessionId, order_rule: str, applied_seq: int, seq: int) -> Place:
        rows = await self._transaction.rows(
            select(func.count().label("before")).where(
                and_(
                    operations.c.session_id == session_id,
                    operations.c.status.in_(OPEN),
                    operations.c.seq > applied_seq,
                    operations.c.seq < seq,
                )
            )
        )
        position: int = rows[0]["before"]
        if order_rule == OrderRule.ASCENDING or position == seq - applied_seq - 1:
            return Place(position=position, missing_seq=None)
        return (await self._line(session_id, order_rule, applied_seq, seq)).place(seq)

    async def _line(self, session_id: SessionId, order_rule: str, applied_seq: int, seq: int) -> Line:
        """Return the line up to operation ``seq``."""
        rows = await self._transaction.rows(
            select(operations.c.seq)
            .where(
                and_(
                    operations.c.session_id == session_id,
                    operations.c.status.in_(OPEN),
                    operations.c.seq > applied_seq,
                    operations.c.seq <= seq,
                )
            )
            .order_by(operations.c.seq)
        )
        return Line(order=OrderRule(order_rule), applied_seq=applied_seq, waiting=[row["seq"] for row in rows])


def operation_of(row: Mapping[Any, Any], *, place: Place | None = None, outcome: Outcome | None = None) -> Operation:
    """Read a row of ``operations``."""
    status = Status(row["status"])
    if status is not Status.QUEUED:
        place = None
    return Operation(
        id=OperationId(row["id"]),
        session_id=SessionId(row["session_id"]),
        project_id=ProjectId(row["project_id"]),
        key_id=KeyId(row["key_id"]),
        seq=row["seq"],
        kind=OperationKind(row["kind"]),
        status=status,
        payload_digest=row["payload_digest"],
        created_at=row["created_at"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        outcome=outcome,
        queue_position=place.position if place is not None else None,
        waits_for_seq=place.missing_seq if place is not None else None,
        progress=_progress_of(row) if status is Status.RUNNING else None,
    )


def _progress_of(row: Mapping[Any, Any]) -> Progress | None:
    done, total = row["progress_done"], row["progress_total"]
    return None if done is None or total is None else Progress(done=done, total=total)


async def record_outcome(transaction: Transaction, row: RowMapping, outcome: Outcome, at: datetime) -> None:
    """Make the operation of ``row`` final, with its outcome in blobs. Its session is locked."""
    digest = await SqlBlobStore(transaction).put(ProjectId(row["project_id"]), encode_outcome(outcome))
    status = Status.FAILED if isinstance(outcome, Failure) else Status.COMPLETED
    await transaction.write(
        update(operations)
        .where(operations.c.id == row["id"])
        .values(status=status.value, staged=False, outcome_digest=digest, finished_at=at)
    )


async def discard_window(transaction: Transaction, session_id: SessionId, seq: int) -> None:
    """Mark the gradients accumulated before the failed operation ``seq`` as thrown away: a replay leaves them out."""
    ended = func.coalesce(
        select(func.max(operations.c.seq))
        .where(
            and_(
                operations.c.session_id == session_id,
                operations.c.seq < seq,
                operations.c.status == Status.COMPLETED,
                operations.c.kind.in_(WINDOW_ENDING),
            )
        )
        .scalar_subquery(),
        0,
    )
    await transaction.write(
        update(operations)
        .where(
            and_(
                operations.c.session_id == session_id,
                operations.c.seq < seq,
                operations.c.seq > ended,
                operations.c.kind == OperationKind.FORWARD_BACKWARD,
                operations.c.status == Status.COMPLETED,
            )
        )
        .values(window_discarded=True)
    )


def _never_arrived(seq: int, missing_seq: int) -> Failure:
    return Failure(
        kind=Kind.CONFLICT,
        code="sequence_gap",
        message=f"operation {seq} waited for seq {missing_seq}, which never arrived",
        field="seq",
        details={"missing_seq": missing_seq},
    )


def _key_reused() -> Conflict:
    return Conflict(
        "this Idempotency-Key was already used for other content",
        code="idempotency_key_reused",
        field="Idempotency-Key",
    )


def _has_next_operation() -> ColumnElement[bool]:
    return exists(
        select(operations.c.id).where(
            and_(operations.c.session_id == sessions.c.id, operations.c.seq == sessions.c.applied_seq + 1)
        )
    )


def _select() -> Select[Any]:
    return select(operations, sessions.c.applied_seq, sessions.c.order_rule).join(
        sessions, operations.c.session_id == sessions.c.id
    )
