"""Which versions load_state operations read. That stands in their bodies, which SQL cannot look into."""

from sqlalchemy import ColumnElement, and_, func, or_, select

from gateway.core.ids import ProjectId, VersionId
from gateway.core.operations import Status
from gateway.core.payloads import LoadState, OperationKind
from gateway.store.blobs import SqlBlobStore
from gateway.store.sessions import OPEN
from gateway.store.tables import LIVE, operations, sessions
from gateway.store.transaction import Transaction
from gateway.store.version_tables import versions


async def is_being_loaded(transaction: Transaction, version_id: VersionId) -> bool:
    """Whether an operation that is not final loads the version."""
    return await _loads(transaction, version_id, operations.c.status.in_(OPEN))


async def may_be_loaded_again(transaction: Transaction, version_id: VersionId) -> bool:
    """Whether an open operation loads the version, or one did that a replay would repeat."""
    behind = operations.c.seq <= func.coalesce(sessions.c.snapshot_seq, 0)
    replayed = and_(operations.c.status == Status.COMPLETED, sessions.c.status.in_(LIVE), ~behind)
    return await _loads(transaction, version_id, or_(operations.c.status.in_(OPEN), replayed))


async def _loads(transaction: Transaction, version_id: VersionId, which: ColumnElement[bool]) -> bool:
    rows = await transaction.rows(
        select(operations.c.project_id, operations.c.payload_digest)
        .join(sessions, operations.c.session_id == sessions.c.id)
        .join(versions, versions.c.project_id == operations.c.project_id)
        .where(and_(versions.c.id == version_id, operations.c.kind == OperationKind.LOAD_STATE, which))
    )
    blobs = SqlBlobStore(transaction)
    for row in rows:
        payload = await blobs.get_payload(ProjectId(row["project_id"]), row["payload_digest"])
        if isinstance(payload, LoadState) and payload.version_id == version_id:
            return True
    return False
