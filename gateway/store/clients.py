"""ClientStore on SQL: clients, their samplers and their custom losses."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, RowMapping, Table, and_, select, update

from gateway.core.clients import Client, Finish, Sampler, Seat, StoredLoss
from gateway.core.ids import ClientId, KeyId, OperationId, ProjectId, SessionId, VersionId
from gateway.store.client_tables import clients, custom_losses, samplers
from gateway.store.sessions import ACCEPTING
from gateway.store.tables import sessions
from gateway.store.text import missing, require_id, require_storable
from gateway.store.transaction import Transaction


class SqlClientStore:
    """ClientStore."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    async def add(self, client: Client) -> None:
        require_storable(client.name, "display_name")
        for label, value in client.user_metadata.items():
            require_storable(label + value, "user_metadata")
        for tag in client.tags:
            require_storable(tag, "tags")
        row: dict[str, Any] = {
            "id": client.id,
            "project_id": client.project_id,
            "key_id": client.key_id,
            "name": client.name,
            "tags": list(client.tags),
            "user_metadata": dict(client.user_metadata),
            "created_at": client.created_at,
            "seen_at": client.seen_at,
            "finished_at": client.finished_at,
            "finish": None if client.finish is None else client.finish.value,
            "detail": client.detail,
        }
        await self._transaction.write(clients.insert().values(row))

    async def get(self, project_id: ProjectId, client_id: ClientId) -> Client:
        require_id(client_id, "client")
        row = await self._transaction.first(select(clients).where(_owned(project_id, client_id)))
        if row is None:
            raise missing("client", client_id)
        return _client_of(row)

    async def page(self, project_id: ProjectId, *, limit: int, offset: int) -> Sequence[Client]:
        rows = await self._transaction.rows(
            select(clients)
            .where(clients.c.project_id == project_id)
            .order_by(clients.c.created_at.desc(), clients.c.id.desc())
            .limit(limit)
            .offset(offset)
        )
        return [_client_of(row) for row in rows]

    async def seen(self, project_id: ProjectId, client_id: ClientId, at: datetime) -> Client:
        client = await self.get(project_id, client_id)
        await self._transaction.write(update(clients).where(clients.c.id == client_id).values(seen_at=at))
        live = await self._live_sessions(client_id)
        for ttl_s in sorted({row["ttl_s"] for row in live if row["ttl_s"] is not None}):
            await self._transaction.write(
                update(sessions)
                .where(
                    and_(
                        sessions.c.id.in_([row["id"] for row in live]),
                        sessions.c.ttl_s == ttl_s,
                        sessions.c.last_used_at < at,
                    )
                )
                .values(last_used_at=at, expires_at=at + timedelta(seconds=ttl_s))
            )
        return client

    async def finish(
        self, project_id: ProjectId, client_id: ClientId, finish: Finish, detail: str | None, at: datetime
    ) -> Sequence[SessionId]:
        await self.get(project_id, client_id)
        require_storable(detail, "detail")
        await self._transaction.write(
            update(clients)
            .where(and_(clients.c.id == client_id, clients.c.finished_at.is_(None)))
            .values(finished_at=at, finish=finish.value, detail=detail)
        )
        return [SessionId(row["id"]) for row in await self._live_sessions(client_id)]

    async def add_sampler(self, sampler: Sampler) -> Sampler:
        row = {
            "client_id": sampler.seat.client_id,
            "client_number": sampler.seat.number,
            "project_id": sampler.project_id,
            "base_model": sampler.base_model,
            "version_id": sampler.version_id,
            "operation_id": sampler.operation_id,
            "session_id": sampler.session_id,
            "copies": sampler.copies,
            "created_at": sampler.created_at,
        }
        await self._transaction.insert_new(samplers, row)
        return await self.sampler(sampler.project_id, sampler.seat)

    async def sampler(self, project_id: ProjectId, seat: Seat) -> Sampler:
        row = await self._transaction.first(
            select(samplers).where(and_(_sits(samplers, seat), samplers.c.project_id == project_id))
        )
        if row is None:
            raise missing("sampler", seat.sampler_address)
        return _sampler_of(row)

    async def sampler_of_operation(self, operation_id: OperationId) -> Sampler | None:
        row = await self._transaction.first(select(samplers).where(samplers.c.operation_id == operation_id))
        return None if row is None else _sampler_of(row)

    async def samplers(self, project_id: ProjectId, client_id: ClientId) -> Sequence[Sampler]:
        rows = await self._transaction.rows(
            select(samplers)
            .where(and_(samplers.c.client_id == client_id, samplers.c.project_id == project_id))
            .order_by(samplers.c.client_number)
        )
        return [_sampler_of(row) for row in rows]

    async def add_loss(self, loss: StoredLoss) -> StoredLoss:
        row = {
            "client_id": loss.seat.client_id,
            "client_number": loss.seat.number,
            "project_id": loss.project_id,
            "document_digest": loss.document_digest,
            "created_at": loss.created_at,
        }
        await self._transaction.insert_new(custom_losses, row)
        return await self.loss(loss.project_id, loss.seat)

    async def loss(self, project_id: ProjectId, seat: Seat) -> StoredLoss:
        row = await self._transaction.first(
            select(custom_losses).where(and_(_sits(custom_losses, seat), custom_losses.c.project_id == project_id))
        )
        if row is None:
            raise missing("custom loss", seat.loss_address)
        return StoredLoss(
            seat=seat,
            project_id=project_id,
            document_digest=row["document_digest"],
            created_at=row["created_at"],
        )

    async def join_sampler(self, project_id: ProjectId, seat: Seat) -> int:
        rows = await self._transaction.write_returning(
            update(samplers)
            .where(and_(_sits(samplers, seat), samplers.c.project_id == project_id))
            .values(copies=samplers.c.copies + 1)
            .returning(samplers.c.copies)
        )
        if not rows:
            raise missing("sampler", seat.sampler_address)
        return rows[0]["copies"]

    async def _live_sessions(self, client_id: ClientId) -> Sequence[RowMapping]:
        return await self._transaction.rows(
            select(sessions.c.id, sessions.c.ttl_s)
            .where(and_(sessions.c.client_id == client_id, sessions.c.status.in_(ACCEPTING)))
            .order_by(sessions.c.id)
        )


def _owned(project_id: ProjectId, client_id: ClientId) -> ColumnElement[bool]:
    return and_(clients.c.id == client_id, clients.c.project_id == project_id)


def _sits(table: Table, seat: Seat) -> ColumnElement[bool]:
    return and_(table.c.client_id == seat.client_id, table.c.client_number == seat.number)


def _client_of(row: RowMapping) -> Client:
    return Client(
        id=ClientId(row["id"]),
        project_id=ProjectId(row["project_id"]),
        key_id=KeyId(row["key_id"]),
        name=row["name"],
        tags=row["tags"],
        user_metadata=row["user_metadata"],
        created_at=row["created_at"],
        seen_at=row["seen_at"],
        finished_at=row["finished_at"],
        finish=None if row["finish"] is None else Finish(row["finish"]),
        detail=row["detail"],
    )


def _sampler_of(row: RowMapping) -> Sampler:
    return Sampler(
        seat=Seat(client_id=ClientId(row["client_id"]), number=row["client_number"]),
        project_id=ProjectId(row["project_id"]),
        base_model=row["base_model"],
        version_id=None if row["version_id"] is None else VersionId(row["version_id"]),
        operation_id=None if row["operation_id"] is None else OperationId(row["operation_id"]),
        session_id=None if row["session_id"] is None else SessionId(row["session_id"]),
        copies=row["copies"],
        created_at=row["created_at"],
    )
