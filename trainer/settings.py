"""The trainer's settings: read once at start from the environment (``LOOPLINE_...``), then passed on."""

import os
from typing import Literal

from pydantic import Field

from gateway.places import Places


class TrainerSettings(Places):
    """Every setting with its default. ``Places`` must be the gateway's own."""

    base_model: str | None = Field(default=None, description="Catalogue name; unset: the catalogue's only model")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1, ...")
    compute_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None, description="What the base computes in; unset: its dtype in the catalogue where hardware has it"
    )
    exact_head: bool = Field(
        default=False, description="Compute logits in float32 also where the base computes coarser"
    )
    threads: int = Field(default=0, ge=0, description="Threads of a CPU kernel; 0: one per usable core")
    micro_batch_tokens: int = Field(default=2048, ge=1, description="Padded tokens computed at once")
    operation_bytes: int | None = Field(
        default=None, ge=1, description="Memory of one operation, beside model and sessions; unset: half the device's"
    )
    lease_s: float = Field(default=15.0, gt=0, description="How long a lost trainer's sessions stay unserved")
    heartbeat_s: float = Field(default=2.0, gt=0, description="How often leases are renewed")
    snapshot_after_s: float = Field(default=20.0, gt=0, description="Longest replay; cheap snapshots come sooner")
    max_on_device: int = Field(default=16, ge=1, description="Sessions on the device; more of them wait on the host")
    max_resident: int = Field(default=16, ge=1, description="Sessions in memory; others wait parked on disk")

    @property
    def resolved_threads(self) -> int:
        return self.threads or len(os.sched_getaffinity(0))
