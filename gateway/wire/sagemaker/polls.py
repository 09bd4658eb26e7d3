"""How long a poll is held. The SDK asks again after two seconds, so holding one saves it that wait; but its polls share
few threads, so holding many would keep the finished ones from being heard of."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.core.ids import KeyId

HOLD_S = 4.0
HELD_AT_ONCE = 2  # for each key; the SDK has five threads or more


class Polls:
    """The polls that this process holds now."""

    def __init__(self) -> None:
        self._held: Counter[KeyId] = Counter()

    @contextmanager
    def holding(self, key_id: KeyId) -> Iterator[float]:
        """Yield how long (seconds) a poll of ``key_id`` may be held."""
        if self._held[key_id] >= HELD_AT_ONCE:
            yield 0.0
            return
        self._held[key_id] += 1
        try:
            yield HOLD_S
        finally:
            self._held[key_id] -= 1
            if not self._held[key_id]:
                del self._held[key_id]
