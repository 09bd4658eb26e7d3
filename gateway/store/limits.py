"""LimitStore on SQL. Time is the database's, so that gateways agree on every bucket."""

from collections.abc import Mapping, Sequence

from sqlalchemy import ColumnElement, Table, and_, bindparam, func, or_, select

from gateway.core.ids import KeyId, ProjectId
from gateway.core.limits import (
    RATES,
    Allowance,
    Bucket,
    Limit,
    Limits,
    LimitScope,
    quota_full,
    rate_limited,
)
from gateway.core.operations import Status
from gateway.core.ports.limits import OwnLimit
from gateway.store.columns import micros
from gateway.store.limit_tables import own_limits, rate_buckets
from gateway.store.tables import LIVE, operations, projects, sessions
from gateway.store.transaction import Transaction
from gateway.store.version_tables import versions

Place = tuple[LimitScope, Limit]


class SqlLimitStore:
    """LimitStore. ``defaults`` are every project's."""

    def __init__(self, transaction: Transaction, defaults: Limits) -> None:
        self._transaction = transaction
        self._defaults = defaults

    async def allowance(self, project_id: ProjectId, key_id: KeyId) -> Allowance:
        limits = await self._limits(project_id, key_id)
        return Allowance(limits=_narrowed(limits), buckets=await self._buckets(project_id, key_id, limits, RATES))

    async def take(self, project_id: ProjectId, key_id: KeyId, limit: Limit, amount: int) -> tuple[int, Allowance]:
        limits = await self._limits(project_id, key_id)
        await self._ensure(project_id, key_id, limits, (limit,))
        every = await self._buckets(project_id, key_id, limits, RATES, lock=True)
        buckets = {place: bucket for place, bucket in every.items() if place[1] is limit}
        granted = max(0, min([amount, *(bucket.left for bucket in buckets.values())]))
        after = await self._move(project_id, key_id, buckets, granted) if granted else buckets
        return granted, Allowance(limits=_narrowed(limits), buckets={**every, **after})

    async def reserve(self, project_id: ProjectId, key_id: KeyId, tokens: int) -> None:
        buckets = await self._token_buckets(project_id, key_id)
        for (scope, rate), bucket in buckets.items():
            if not bucket.covers(tokens):
                raise rate_limited(rate, scope, bucket, tokens)
        if tokens:
            await self._move(project_id, key_id, buckets, tokens)

    async def charge(self, project_id: ProjectId, key_id: KeyId, tokens: int) -> None:
        if tokens:
            await self._move(project_id, key_id, await self._token_buckets(project_id, key_id), tokens)

    async def _token_buckets(self, project_id: ProjectId, key_id: KeyId) -> Mapping[Place, Bucket]:
        """Return the buckets of tokens, locked; nothing where tokens are not limited."""
        limits = await self._limits(project_id, key_id)
        if not any(name is Limit.TOKENS for _, name in limits):
            return {}
        await self._ensure(project_id, key_id, limits, (Limit.TOKENS,))
        return await self._buckets(project_id, key_id, limits, (Limit.TOKENS,), lock=True)

    async def require_room(self, project_id: ProjectId, key_id: KeyId, limit: Limit, *, more: int = 1) -> None:
        limits = await self._limits(project_id, key_id)
        if not any(name is limit for _, name in limits):
            return
        if limit is Limit.SESSIONS:  # two that open the last one at once must not both find it free
            await self._transaction.rows(
                select(projects.c.id).where(projects.c.id == project_id).with_for_update(key_share=True)
            )
        for scope in LimitScope:
            most = limits.get((scope, limit))
            if most is not None:
                count = await self._count(limit, scope, project_id, key_id)
                if count + more > most:
                    raise quota_full(limit, scope, most, count)

    async def own(self, project_id: ProjectId | None = None) -> Sequence[OwnLimit]:
        query = select(own_limits).order_by(own_limits.c.scope, own_limits.c.scope_id, own_limits.c.name)
        if project_id is not None:
            query = query.where(own_limits.c.project_id == project_id)
        return [
            OwnLimit(
                scope=LimitScope(row["scope"]),
                scope_id=row["scope_id"],
                project_id=ProjectId(row["project_id"]),
                limit=Limit(row["name"]),
                value=row["value"],
            )
            for row in await self._transaction.rows(query)
        ]

    async def set(self, own: OwnLimit) -> None:
        values = {"value": own.value}
        await self._transaction.write(
            self._transaction.insert(own_limits)
            .values(
                scope=own.scope.value,
                scope_id=own.scope_id,
                name=own.limit.value,
                project_id=own.project_id,
                **values,
            )
            .on_conflict_do_update(
                index_elements=[own_limits.c.scope, own_limits.c.scope_id, own_limits.c.name], set_=values
            )
        )

    async def remove(self, scope: LimitScope, scope_id: str, limit: Limit) -> bool:
        removed = await self._transaction.write(
            own_limits.delete().where(
                and_(own_limits.c.scope == scope, own_limits.c.scope_id == scope_id, own_limits.c.name == limit)
            )
        )
        return bool(removed)

    async def _limits(self, project_id: ProjectId, key_id: KeyId) -> Mapping[Place, int]:
        limits: dict[Place, int] = {(LimitScope.PROJECT, name): value for name, value in self._defaults.items()}
        rows = await self._transaction.rows(_OWN_OF, {"project": project_id, "key": key_id})
        return limits | {(LimitScope(row["scope"]), Limit(row["name"])): row["value"] for row in rows}

    async def _buckets(
        self,
        project_id: ProjectId,
        key_id: KeyId,
        limits: Mapping[Place, int],
        rates: Sequence[Limit],
        *,
        lock: bool = False,
    ) -> Mapping[Place, Bucket]:
        places = [place for place in limits if place[1] in rates]
        if not places:
            return {}
        query = _LOCKED_BUCKETS_OF if lock else _BUCKETS_OF
        rows = await self._transaction.rows(query, {"project": project_id, "key": key_id})
        full_at = {(LimitScope(row["scope"]), Limit(row["name"])): row["full_at"] for row in rows}
        now = micros(self._transaction.clock.now())
        return {place: Bucket(limit=limits[place], full_at=full_at.get(place, 0), now=now) for place in places}

    async def _ensure(
        self, project_id: ProjectId, key_id: KeyId, limits: Mapping[Place, int], rates: Sequence[Limit]
    ) -> None:
        """Make the rows that are missing: a row that is not there cannot be locked."""
        for scope, name in limits:
            if name in rates:
                row = {
                    "scope": scope.value,
                    "scope_id": project_id if scope is LimitScope.PROJECT else key_id,
                    "name": name.value,
                    "project_id": project_id,
                    "full_at": 0,
                }
                await self._transaction.insert_new(rate_buckets, row)

    async def _move(
        self, project_id: ProjectId, key_id: KeyId, buckets: Mapping[Place, Bucket], amount: int
    ) -> Mapping[Place, Bucket]:
        after: dict[Place, Bucket] = {}
        for (scope, name), bucket in buckets.items():
            full_at = bucket.taken(amount)
            await self._transaction.write(
                _FILL,
                {
                    "of": scope.value,
                    "id": project_id if scope is LimitScope.PROJECT else key_id,
                    "limit": name.value,
                    "at": full_at,
                },
            )
            after[scope, name] = Bucket(limit=bucket.limit, full_at=full_at, now=bucket.now)
        return after

    async def _count(self, limit: Limit, scope: LimitScope, project_id: ProjectId, key_id: KeyId) -> int:
        match limit:
            case Limit.SESSIONS:
                table, value, alive = sessions, func.count(), sessions.c.status.in_(LIVE)
            case Limit.QUEUE:
                table, value, alive = operations, func.count(), operations.c.status == Status.QUEUED
            case Limit.VERSIONS | Limit.STORED:
                counted = func.count() if limit is Limit.VERSIONS else func.coalesce(func.sum(versions.c.size_bytes), 0)
                table, value, alive = versions, counted, versions.c.purged_at.is_(None)
            case _:
                raise ValueError(f"{limit} is no quota")
        owned = table.c.project_id == project_id
        if scope is LimitScope.KEY:
            if table is versions:
                owned = and_(owned, versions.c.session_id.in_(select(sessions.c.id).where(sessions.c.key_id == key_id)))
            else:
                owned = and_(owned, table.c.key_id == key_id)
        rows = await self._transaction.rows(select(value.label("count")).select_from(table).where(and_(owned, alive)))
        return int(rows[0]["count"])


def _of(table: Table) -> ColumnElement[bool]:
    return or_(
        and_(table.c.scope == LimitScope.PROJECT, table.c.scope_id == bindparam("project")),
        and_(table.c.scope == LimitScope.KEY, table.c.scope_id == bindparam("key")),
    )


# Run with every call, so built once: building takes longer than running.
_OWN_OF = select(own_limits.c.scope, own_limits.c.name, own_limits.c.value).where(_of(own_limits))
_BUCKETS_OF = (
    select(rate_buckets.c.scope, rate_buckets.c.name, rate_buckets.c.full_at)
    .where(_of(rate_buckets))
    .order_by(rate_buckets.c.scope, rate_buckets.c.name)
)
_LOCKED_BUCKETS_OF = _BUCKETS_OF.with_for_update()
_FILL = (
    rate_buckets.update()
    .where(
        and_(
            rate_buckets.c.scope == bindparam("of"),
            rate_buckets.c.scope_id == bindparam("id"),
            rate_buckets.c.name == bindparam("limit"),
        )
    )
    .values(full_at=bindparam("at"))
)


def _narrowed(limits: Mapping[Place, int]) -> Limits:
    names = {name for _, name in limits}
    return {name: min(value for (_, other), value in limits.items() if other is name) for name in names}
