"""Usage facts: what was consumed, recorded in the transaction of the effect they price.

Billing reads them as an outbox, keyed by ``(source, meter)``: a fact counts once, whatever is retried.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from gateway.core.ids import KeyId, ProjectId, SessionId, VersionId


class Meter(StrEnum):
    """What is counted. All are tokens."""

    PREFILL = "prefill"  # prompt tokens an engine computed
    CACHED_PREFILL = "cached_prefill"  # prompt tokens an engine took from its cache
    SAMPLE = "sample"  # tokens an engine generated
    TRAIN = "train"  # model-input tokens of forward and forward_backward


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageFact:
    """``source`` is the id of the operation or sample that consumed ``quantity`` (> 0) tokens."""

    source: str
    meter: Meter
    quantity: int
    project_id: ProjectId
    key_id: KeyId
    session_id: SessionId | None
    version_id: VersionId | None
    base_model: str
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageTotal:
    """A sum of facts over one (key, session, base model, meter)."""

    key_id: KeyId
    session_id: SessionId | None
    base_model: str
    meter: Meter
    quantity: int
