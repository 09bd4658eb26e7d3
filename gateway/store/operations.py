"""OperationStore on SQL: the operation log as reorder buffer, retry table and result store.

Whoever appends locks the session first: numbers are handed out once, and a stop cannot slip in between.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import RowMapping, Select, and_, bindparam, func, select

from gateway.core.codec import decode_outcome
from gateway.core.errors import Conflict, Invalid, NotFound, SequenceReused
from gateway.core.ids import KeyId, OperationId, ProjectId, SessionId, new_operation_id
from gateway.core.operations import FINAL, MAX_SEQ, Operation, Status
from gateway.core.payloads import OperationKind, Payload, billed_tokens, kind_of
from gateway.core.results import Outcome
from gateway.core.sessions import Session
from gateway.core.tracing import current_traceparent
from gateway.store import refusals
from gateway.store.blobs import KEPT, SqlBlobStore
from gateway.store.gaps import fail_gaps
from gateway.store.keys_used import free_key
from gateway.store.line import line_of, place_of
from gateway.store.operation_rows import operation_of
from gateway.store.sessions import ACCEPTING, lock_session, mark_used, read_session
from gateway.store.tables import operations, sessions
from gateway.store.text import missing, require_id, require_storable, storable
from gateway.store.transaction import Transaction

_IDS_PER_QUERY = 500


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
        if idempotency_key is not None:
            await free_key(self._transaction, operations, session.project_id, idempotency_key)
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
            "tokens": billed_tokens(payload),
            "traceparent": current_traceparent(),
        }
        if not await self._transaction.insert_new(operations, row):
            # Only the idempotency key can clash: the session is locked. Another session has it.
            raise _key_reused()
        await mark_used(self._transaction, session.id, locked["ttl_s"], now)
        self._transaction.announce()
        place = await place_of(self._transaction, session.id, locked["order_rule"], locked["applied_seq"], seq)
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

    async def highest_seq(self, session_id: SessionId) -> int:
        rows = await self._transaction.rows(_HIGHEST, {"session": session_id})
        return rows[0]["highest"] or 0

    async def _next_seq(self, session_id: SessionId, applied_seq: int) -> int:
        seq = max(await self.highest_seq(session_id), applied_seq) + 1
        if seq > MAX_SEQ:
            raise Invalid(f"the session has used the highest seq there is, {MAX_SEQ}", field="seq")
        return seq

    async def get(self, project_id: ProjectId, operation_id: OperationId) -> Operation:
        require_id(operation_id, "operation")
        found = await self._one(_OWN, {"operation": operation_id, "project": project_id})
        if found is None:
            raise missing("operation", operation_id)
        return found

    async def by_seq(self, session_id: SessionId, seq: int) -> Operation | None:
        return await self._one(_AT_SEQ, {"session": session_id, "seq": seq})

    async def by_idempotency_key(self, project_id: ProjectId, key: str) -> Operation | None:
        if not storable(key):
            return None
        since = self._transaction.clock.now() - KEPT
        return await self._one(_BY_KEY, {"project": project_id, "key": key, "since": since})

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
        line = await line_of(self._transaction, session_id, last["order_rule"], last["applied_seq"], last["seq"])
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

    async def refuse(self, session: Session, key_id: KeyId, seq: int, kind: OperationKind) -> None:
        await refusals.refuse(self._transaction, session.id, key_id, seq, kind)

    async def fail_gaps(self, *, older_than: datetime) -> Sequence[OperationId]:
        return await fail_gaps(self._transaction, older_than=older_than)

    async def _outcome(self, row: RowMapping) -> Outcome:
        try:
            return decode_outcome(await self._blobs.get(ProjectId(row["project_id"]), row["outcome_digest"]))
        except NotFound:
            raise NotFound(
                f"the result of operation {row['id']} was kept for a day and is gone", code="result_expired"
            ) from None

    async def _one(self, query: Select[Any], values: Mapping[str, Any]) -> Operation | None:
        row = await self._transaction.first(query, values)
        if row is None:
            return None
        outcome = None
        if row["outcome_digest"] is not None:
            outcome = await self._outcome(row)
        place = None
        if row["status"] == Status.QUEUED:
            place = await place_of(
                self._transaction, SessionId(row["session_id"]), row["order_rule"], row["applied_seq"], row["seq"]
            )
        return operation_of(row, place=place, outcome=outcome)


def _key_reused() -> Conflict:
    return Conflict(
        "this Idempotency-Key was already used for other content",
        code="idempotency_key_reused",
        field="Idempotency-Key",
    )


def _select() -> Select[Any]:
    return select(operations, sessions.c.applied_seq, sessions.c.order_rule).join(
        sessions, operations.c.session_id == sessions.c.id
    )


# Asked with every operation, so built once.
_HIGHEST = select(func.max(operations.c.seq).label("highest")).where(operations.c.session_id == bindparam("session"))
_AT_SEQ = _select().where(and_(operations.c.session_id == bindparam("session"), operations.c.seq == bindparam("seq")))
_OWN = _select().where(and_(operations.c.id == bindparam("operation"), operations.c.project_id == bindparam("project")))
_BY_KEY = _select().where(
    and_(
        operations.c.project_id == bindparam("project"),
        operations.c.idempotency_key == bindparam("key"),
        operations.c.created_at > bindparam("since"),
    )
)
