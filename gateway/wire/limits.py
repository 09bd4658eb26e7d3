"""Rates at the edge.

A gateway takes requests from the shared buckets a second's worth at a time and spends them here, so that a busy key
does not cost a write per request; what it knows of a key's limits is at most a second old. Here a call is let in while
any tokens are left; what it can take at most is taken when its hold is placed (``wire.metering``), and corrected after.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.core.ids import KeyId, ProjectId
from gateway.core.limits import Allowance, Limit, rate_limited
from gateway.core.ports import Database
from gateway.core.principals import Principal
from gateway.core.sampling import SampleRequest

MOST = 4096  # purses, beyond which those that nobody used for KEPT_S are forgotten
KEPT_S = 1.0  # for so long limits are not looked at again; what is not spent twice as long after is given up


@dataclass(slots=True)
class _Purse:
    """What one key may still do here until ``until``."""

    allowance: Allowance = field(default_factory=Allowance)
    left: int = 0
    until: float = 0.0
    filling: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def fresh(self) -> bool:
        return time.monotonic() < self.until


class Limiter:
    """Lets requests in. One per gateway."""

    def __init__(self, database: Database, *, most: int = MOST, kept_s: float = KEPT_S) -> None:
        self._database = database
        self._most = most
        self._kept_s = kept_s
        self._purses: dict[tuple[ProjectId, KeyId], _Purse] = {}

    def __len__(self) -> int:
        """Return how many keys it remembers."""
        return len(self._purses)

    async def allowance(self, principal: Principal) -> Allowance:
        """Return the caller's limits without counting a request."""
        purse = self._purse(principal)
        if not purse.fresh:
            purse.allowance = await self._read(principal)
            purse.left, purse.until = 0, time.monotonic() + self._kept_s
        return purse.allowance

    async def admit(self, principal: Principal) -> tuple[Allowance, Mapping[str, str]]:
        """Count one request; return the caller's limits, and the headers that say what is left.

        Raises:
            RateLimited: no request, or no token, is left for the project or the key.
        """
        purse = self._purse(principal)
        async with purse.filling:
            if not purse.fresh or (not purse.left and Limit.REQUESTS in purse.allowance.limits):
                await self._fill(purse, principal)
            for (scope, rate), bucket in sorted(purse.allowance.buckets.items(), key=lambda item: item[1].left):
                if not purse.left if rate is Limit.REQUESTS else bucket.left <= 0:
                    raise rate_limited(rate, scope, bucket)
            purse.left = max(0, purse.left - 1)
        return purse.allowance, headers(purse.allowance, purse.left)

    def _purse(self, principal: Principal) -> _Purse:
        whose = principal.project_id, principal.key_id
        if whose not in self._purses and len(self._purses) >= self._most:
            self._purses = {one: purse for one, purse in self._purses.items() if purse.fresh or purse.filling.locked()}
        return self._purses.setdefault(whose, _Purse())

    async def _fill(self, purse: _Purse, principal: Principal) -> None:
        """Look at the limits, and take a second's worth of requests unless half of the last one is left."""
        kept = purse.left if time.monotonic() < purse.until + self._kept_s else 0
        share = _share(purse.allowance)
        if share is None or 2 * kept > share:
            purse.allowance = await self._read(principal)
            share = _share(purse.allowance)
        if share is not None:
            kept = min(kept, share)
            if 2 * kept <= share:
                more = share - kept
                taken, purse.allowance = await self._database.jot(
                    lambda unit: unit.limits.take(principal.project_id, principal.key_id, Limit.REQUESTS, more)
                )
                kept += taken
        purse.left, purse.until = kept, time.monotonic() + self._kept_s

    async def _read(self, principal: Principal) -> Allowance:
        return await self._database.glance(lambda unit: unit.limits.allowance(principal.project_id, principal.key_id))


def _share(allowance: Allowance) -> int | None:
    """Return a second's worth of requests, one at least; None where they are not limited, or nothing is known yet."""
    limit = allowance.limits.get(Limit.REQUESTS)
    return None if limit is None else max(1, limit // 60)


def headers(allowance: Allowance, purse: int) -> dict[str, str]:
    """Return OpenAI's headers of the narrowest bucket of each rate; ``purse`` was taken from it and is not spent."""
    said: dict[str, str] = {}
    for word, rate, more in (("requests", Limit.REQUESTS, purse), ("tokens", Limit.TOKENS, 0)):
        bucket = allowance.narrowest(rate)
        if bucket is not None:
            said[f"x-ratelimit-limit-{word}"] = str(bucket.limit)
            said[f"x-ratelimit-remaining-{word}"] = str(max(0, min(bucket.limit, bucket.left + more)))
            said[f"x-ratelimit-reset-{word}"] = f"{bucket.reset_s:.3f}s"
    return said


def check_sizes(allowance: Allowance, request: SampleRequest, *, samples: str) -> None:
    """Hold a sampling request against the caller's limits; ``samples`` is what the dialect calls its number of samples.

    Raises:
        Invalid: ``limit_exceeded``.
    """
    allowance.check(Limit.SAMPLES, request.num_samples, name=samples)
    allowance.check(Limit.TOKENS_OUT, request.params.max_tokens or 0, name="max_tokens")
    allowance.check(Limit.STOPS, len(request.params.stop) + len(request.params.stop_token_ids), name="stop")
