"""Keys as the database had them a moment ago, so that a busy key does not cost a read per request."""

import time

from gateway.core.ids import KeyId
from gateway.core.ports import Database
from gateway.core.principals import Key

KEPT_S = 0.7  # a key that another process revokes must be refused within a second
MOST = 4096  # keys kept at a time


class KnownKeys:
    """Looks keys up. One per gateway."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._seen: dict[KeyId, tuple[Key, float]] = {}

    async def get(self, key_id: KeyId) -> Key | None:
        """Return the key as it was at most KEPT_S ago; None when there is none."""
        now = time.monotonic()
        seen = self._seen.get(key_id)
        if seen is not None and now < seen[1]:
            return seen[0]
        key = await self._database.glance(lambda unit: unit.keys.get(key_id))
        if key is None:
            self._seen.pop(key_id, None)
            return None
        if len(self._seen) >= MOST:
            self._seen.clear()
        self._seen[key_id] = (key, now + KEPT_S)
        return key
