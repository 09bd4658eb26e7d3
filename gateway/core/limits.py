"""Limits: how much a project and each of its keys may ask for.

Every project has the gateway's defaults; its own value, if it has one, replaces them. A key has only values of its own.
Both bind: a call must fit its project's limits and its key's.

Rates are buckets of one minute that fill evenly. A bucket is one moment, ``full_at``: when it will be full again.
Taking ``n`` moves that moment on by ``n`` times 60 s / limit; a bucket is empty when the moment is 60 s away.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gateway.core.errors import Exhausted, Invalid

WINDOW_US = 60_000_000


class LimitScope(StrEnum):
    """What a limit is of."""

    PROJECT = "project"
    KEY = "key"


class Limit(StrEnum):
    """What is limited."""

    REQUESTS = "requests_per_minute"  # calls that work or change something; reading and waiting are free
    TOKENS = "tokens_per_minute"  # prompt, sampled and trained tokens
    SESSIONS = "sessions"  # live at a time
    QUEUE = "queued_operations"  # waiting at a time
    VERSIONS = "versions"  # whose files are kept
    STORED = "stored_bytes"  # of those files
    BODY = "body_bytes"  # of one request, decoded
    SAMPLES = "n"  # per prompt
    TOKENS_OUT = "max_tokens"  # of one sample
    STOPS = "stop"  # entries
    PROMPTS = "prompts"  # of one request


RATES = (Limit.REQUESTS, Limit.TOKENS)
Limits = Mapping[Limit, int]
"""What is not in it is not limited."""


class RateLimited(Exhausted):
    """A rate is used up; ``details`` say which, whose, and in how many seconds to come back."""

    default_code = "rate_limit_exceeded"


class QuotaFull(Exhausted):
    """As much exists as may exist at a time."""

    default_code = "quota_exceeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One rate of one project or key at one moment, in microseconds."""

    limit: int
    full_at: int
    now: int

    @property
    def left(self) -> int:
        """How many could be taken now; below 0 for a bucket that owes."""
        return (self.now + WINDOW_US - max(self.full_at, self.now)) * self.limit // WINDOW_US

    def covers(self, amount: int) -> bool:
        """Whether ``amount`` can be taken: of more than the whole limit, only a full bucket is asked."""
        return self.left >= min(amount, self.limit)

    def taken(self, amount: int) -> int:
        """Return ``full_at`` after taking ``amount``, which may be more than is left, or below 0 to give back."""
        return max(self.full_at, self.now) + -(-amount * WINDOW_US // self.limit)

    def wait_s(self, amount: int = 1) -> int:
        """Return after how many whole seconds, at least 1, ``amount`` can be taken."""
        over = self.taken(min(amount, self.limit)) - (self.now + WINDOW_US)
        return max(1, math.ceil(over / 1_000_000))

    @property
    def reset_s(self) -> float:
        """Return in how many seconds the bucket is full."""
        return max(0, self.full_at - self.now) / 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What one caller may ask for now: its limits, the smaller of its project's and its key's, and its buckets."""

    limits: Limits = field(default_factory=dict[Limit, int])
    buckets: Mapping[tuple[LimitScope, Limit], Bucket] = field(default_factory=dict[tuple[LimitScope, Limit], Bucket])

    def narrowest(self, rate: Limit) -> Bucket | None:
        """Return the bucket of ``rate`` that has least left."""
        found = [bucket for (_, name), bucket in self.buckets.items() if name is rate]
        return min(found, key=lambda bucket: bucket.left, default=None)

    def check(self, limit: Limit, got: int, *, name: str) -> None:
        """Raise unless ``got`` is within the limit.

        Raises:
            Invalid: ``limit_exceeded``, with the field and both numbers.
        """
        most = self.limits.get(limit)
        if most is not None and got > most:
            raise Invalid(
                f"{name} must be at most {most} for this key, got {got}",
                code="limit_exceeded",
                field=name,
                details={"limit": most, "got": got},
            )


def rate_limited(rate: Limit, scope: LimitScope, bucket: Bucket, amount: int = 1) -> RateLimited:
    wait_s = bucket.wait_s(amount)
    return RateLimited(
        f"the {scope} has used its {bucket.limit} {rate.replace('_', ' ')}; try again in {wait_s} s",
        details={"limit": bucket.limit, "rate": rate.value, "scope": scope.value, "retry_after_s": wait_s},
    )


def quota_full(limit: Limit, scope: LimitScope, most: int, got: int) -> QuotaFull:
    return QuotaFull(
        f"the {scope} may have {most} {limit.replace('_', ' ')} and has {got}",
        details={"limit": most, "got": got, "quota": limit.value, "scope": scope.value},
    )
