"""The leases of sessions: who may run one, under which epoch, and how it passes on.

The epoch fences: it grows with every new holder and with every lease that ran out, and whoever writes under an older
one is refused before anything is written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, RowMapping, and_, select, update

from gateway.core.ids import SessionId
from gateway.core.operations import Status
from gateway.core.ports import Lease, StaleLease, Work
from gateway.core.sessions import ComputeRules
from gateway.store.sessions import lock_session, released
from gateway.store.tables import LIVE, operations, sessions
from gateway.store.transaction import Transaction


class SqlLeaseStore:
    """The part of WorkStore that keeps leases."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    async def owners(self, base_model: str) -> Sequence[str]:
        rows = await self._transaction.rows(
            select(sessions.c.lease_owner)
            .distinct()
            .where(
                and_(
                    sessions.c.base_model == base_model,
                    sessions.c.status.in_(LIVE),
                    sessions.c.lease_owner.is_not(None),
                )
            )
        )
        return [row["lease_owner"] for row in rows]

    async def release_all(self, owner: str) -> int:
        given_back = await self._transaction.write(
            update(sessions).where(sessions.c.lease_owner == owner).values(lease_owner=None, lease_until=None)
        )
        if given_back:
            self._transaction.announce()
        return given_back

    async def renew(self, *, owner: str, lease_s: float, at: datetime) -> Mapping[SessionId, int]:
        """As the port says. A lease that has run out is over: it is not renewed, whoever had it."""
        held = and_(sessions.c.lease_owner == owner, sessions.c.lease_until > at, sessions.c.status.in_(LIVE))
        rows = await self._transaction.rows(
            select(sessions.c.id).where(held).order_by(sessions.c.id).with_for_update(key_share=True)
        )
        renewed = await self._transaction.write_returning(
            update(sessions)
            .where(and_(held, sessions.c.id.in_([row["id"] for row in rows])))
            .values(lease_until=at + timedelta(seconds=lease_s))
            .returning(sessions.c.id, sessions.c.epoch)
        )
        return {SessionId(row["id"]): row["epoch"] for row in renewed}

    async def release(self, lease: Lease) -> None:
        """Give the session back; a lease that is stale already has nothing to give."""
        given_back = await self._transaction.write(update(sessions).where(held_by(lease)).values(**released()))
        if given_back:
            self._transaction.announce()

    async def give_back(self, work: Work) -> None:
        await self.fenced(work.lease)
        await self._transaction.write(
            update(operations)
            .where(and_(operations.c.id == work.operation.id, operations.c.status == Status.RUNNING))
            .values(attempts=work.losses)
        )
        await self.release(work.lease)

    async def recovering(self, lease: Lease, *, seq: int, losses: int) -> None:
        """As the port says. Nobody is woken for it."""
        changed = await self._transaction.write(
            update(sessions).where(held_by(lease)).values(recovering=True, recovered_seq=seq, recovery_losses=losses)
        )
        if not changed:
            raise stale(lease)

    async def begin(self, work: Work, *, rules: ComputeRules, made_with: Mapping[str, str], note: str | None) -> None:
        session = await self.fenced(work.lease)
        frozen = session["compute_rules"] or asdict(rules)
        await self._transaction.write(
            update(sessions)
            .where(sessions.c.id == work.session.id)
            .values(
                recovering=False,
                recovered_seq=None,
                recovery_losses=None,
                compute_rules=frozen,
                made_with=dict(made_with),
                replay_note=note or session["replay_note"],
            )
        )
        await self._transaction.write(
            update(operations)
            .where(and_(operations.c.id == work.operation.id, operations.c.status == Status.RUNNING))
            .values(attempts=work.losses + 1)
        )

    async def fenced(self, lease: Lease) -> RowMapping:
        """Lock the session of ``lease`` and return its row. Raises StaleLease."""
        session = await lock_session(self._transaction, lease.session_id)
        if session["epoch"] != lease.epoch or session["lease_owner"] != lease.owner:
            raise stale(lease)
        return session


def held_by(lease: Lease) -> ColumnElement[bool]:
    return and_(
        sessions.c.id == lease.session_id, sessions.c.epoch == lease.epoch, sessions.c.lease_owner == lease.owner
    )


def stale(lease: Lease) -> StaleLease:
    return StaleLease(f"{lease.owner} no longer holds session {lease.session_id} under epoch {lease.epoch}")
