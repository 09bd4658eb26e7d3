"""Upkeep on SQL: what the gateway does to versions by itself, and what the gate found."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime

from sqlalchemy import and_, select, update

from gateway.core.ids import VersionId
from gateway.core.versions import Check, Event, Occasion, Version
from gateway.store.loads import may_be_loaded_again
from gateway.store.registry import note
from gateway.store.transaction import Transaction
from gateway.store.version_rows import report_of, version_of
from gateway.store.version_tables import version_checks, versions


class SqlUpkeep:
    """Upkeep."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    async def expire_due(self, at: datetime) -> Sequence[VersionId]:
        """As the port says. Expiry itself needs no row: whoever admits a request looks at the clock."""
        rows = await self._transaction.write_returning(
            update(versions)
            .where(and_(versions.c.expires_at <= at, versions.c.deleted_at.is_(None)))
            .values(deleted_at=versions.c.expires_at)
            .returning(versions.c.id)
        )
        for row in rows:
            await note(self._transaction, row["id"], Event.EXPIRED, at)
        return [VersionId(row["id"]) for row in rows]

    async def deleted_before(self, moment: datetime, *, limit: int) -> Sequence[Version]:
        rows = await self._transaction.rows(
            select(versions)
            .where(and_(versions.c.deleted_at <= moment, versions.c.purged_at.is_(None)))
            .order_by(versions.c.deleted_at)
            .limit(limit)
        )
        return [version_of(row) for row in rows]

    async def used(self, version_ids: Sequence[VersionId], *, until: datetime) -> None:
        await self._transaction.write(update(versions).where(versions.c.id.in_(version_ids)).values(used_until=until))

    async def is_used(self, version_id: VersionId, *, at: datetime) -> bool:
        row = await self._transaction.first(
            select(versions.c.id).where(and_(versions.c.id == version_id, versions.c.used_until > at))
        )
        return row is not None or await may_be_loaded_again(self._transaction, version_id)

    async def purged(self, version_id: VersionId, *, at: datetime) -> None:
        changed = await self._transaction.write(
            update(versions)
            .where(and_(versions.c.id == version_id, versions.c.purged_at.is_(None)))
            .values(purged_at=at)
        )
        if changed:
            await note(self._transaction, version_id, Event.PURGED, at)

    async def record_check(self, check: Check) -> None:
        verdict = {
            "occasion": check.occasion.value,
            "at": check.at,
            "report": None if check.report is None else asdict(check.report),
            "failure": check.failure,
        }
        await self._transaction.write(
            self._transaction.insert(version_checks)
            .values(version_id=check.version_id, engine=check.engine, **verdict)
            .on_conflict_do_update(index_elements=[version_checks.c.version_id, version_checks.c.engine], set_=verdict)
        )

    async def checks(self, version_ids: Sequence[VersionId]) -> Mapping[VersionId, Sequence[Check]]:
        rows = await self._transaction.rows(
            select(version_checks).where(version_checks.c.version_id.in_(version_ids)).order_by(version_checks.c.engine)
        )
        found: dict[VersionId, list[Check]] = {}
        for row in rows:
            check = Check(
                version_id=VersionId(row["version_id"]),
                engine=row["engine"],
                occasion=Occasion(row["occasion"]),
                at=row["at"],
                report=None if row["report"] is None else report_of(row["report"]),
                failure=row["failure"],
            )
            found.setdefault(check.version_id, []).append(check)
        return found
