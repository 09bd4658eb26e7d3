"""Usage facts: what was consumed, recorded in the transaction of the effect they price.

Billing reads them as an outbox, keyed by ``(source, meter)``: a fact counts once, whatever is retried.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from gateway.core.ids import KeyId, ProjectId, SessionId, VersionId

HOUSE = ProjectId("proj-house")  # what the gateway consumes itself: canaries, probes, lost calls; counted, never priced
HOUSE_NAME = "(house)"
TAG = "tag"  # the entry of a session's user_metadata that labels its usage


class Meter(StrEnum):
    """What is counted: tokens, and of storage kilobytes times months."""

    PREFILL = "prefill"  # prompt tokens an engine computed
    CACHED_PREFILL = "cached_prefill"  # prompt tokens an engine took from its cache
    SAMPLE = "sample"  # tokens an engine generated
    TRAIN = "train"  # model-input tokens of forward and forward_backward
    STORAGE = "storage"  # 1000 bytes of saved versions, for a month


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageFact:
    """``source`` is the id of the operation or sample that consumed ``quantity`` (> 0) units of ``meter``.

    The facts of an ``engine`` add up to its own counters; what a call is not billed for (a prompt counted again for
    each of its samples) is a fact of the house beside its own. None where no engine was asked.
    """

    source: str
    meter: Meter
    quantity: int
    project_id: ProjectId
    key_id: KeyId
    session_id: SessionId | None
    version_id: VersionId | None
    base_model: str
    at: datetime
    tag: str | None = None
    engine: str | None = None


def house_facts(
    *,
    source: str,
    engine: str,
    prompt: int,
    sampled: int,
    base_model: str,
    version_id: VersionId | None,
    at: datetime,
) -> list[UsageFact]:
    """Return what an engine counted and nobody pays for, as facts of the house."""
    return [
        UsageFact(
            source=source,
            meter=meter,
            quantity=quantity,
            project_id=HOUSE,
            key_id=KeyId(""),
            session_id=None,
            version_id=version_id,
            base_model=base_model,
            at=at,
            engine=engine,
        )
        for meter, quantity in ((Meter.PREFILL, prompt), (Meter.SAMPLE, sampled))
        if quantity > 0
    ]
