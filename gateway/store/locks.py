"""LockStore on SQL."""

from datetime import datetime, timedelta

from sqlalchemy import or_

from gateway.store.tables import locks
from gateway.store.transaction import Transaction

LONGEST = timedelta(minutes=10)  # of any lease on a lock
CLOCK_SLACK = timedelta(seconds=60)  # how far apart the clocks of processes may be


class SqlLockStore:
    """LockStore. Taking a lock wakes nobody. One that ends later than any lease could is free: a clock was set back."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    async def hold(self, name: str, *, owner: str, lease_s: float, at: datetime) -> bool:
        expires_at = at + timedelta(seconds=lease_s)
        insert = self._transaction.insert(locks).values(name=name, owner=owner, expires_at=expires_at)
        return bool(
            await self._transaction.write(
                insert.on_conflict_do_update(
                    index_elements=[locks.c.name],
                    set_={"owner": owner, "expires_at": expires_at},
                    where=or_(
                        locks.c.owner == owner,
                        locks.c.expires_at <= at,
                        locks.c.expires_at > at + max(timedelta(seconds=lease_s), LONGEST) + CLOCK_SLACK,
                    ),
                )
            )
        )
