"""The trainer's settings: read once at start from the environment (``LOOPLINE_...``), then passed on."""

import os
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class TrainerSettings(BaseSettings):
    """Every setting with its default. The first three are the gateway's own and must name the same places."""

    model_config = SettingsConfigDict(env_prefix="LOOPLINE_", extra="ignore", frozen=True)

    data_dir: Path = Field(default=Path(".loopline"), description="Database, blobs, artefacts, models, logs")
    database_url: str | None = Field(default=None, description="SQLAlchemy URL; unset: SQLite under data_dir")
    catalog: Path | None = Field(default=None, description="Catalogue of base models; unset: run/catalog.toml")
    base_model: str | None = Field(default=None, description="Catalogue name; unset: the catalogue's only model")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1, ...")
    compute_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None, description="What the base computes in; unset: its dtype in the catalogue where hardware has it"
    )
    threads: int = Field(default=0, ge=0, description="Threads of a CPU kernel; 0: one per usable core")
    micro_batch_tokens: int = Field(default=2048, ge=1, description="Padded tokens computed at once")
    lease_s: float = Field(default=15.0, gt=0, description="How long a lost trainer's sessions stay unserved")
    heartbeat_s: float = Field(default=2.0, gt=0, description="How often leases are renewed")
    snapshot_after_s: float = Field(default=20.0, gt=0, description="Replay time that makes a snapshot worth its write")
    max_resident: int = Field(default=16, ge=1, description="Sessions in memory; others wait parked on disk")

    @property
    def resolved_database_url(self) -> str:
        return self.database_url or f"sqlite+aiosqlite:///{self.data_dir.absolute() / 'loopline.db'}"

    @property
    def resolved_catalog(self) -> Path:
        return self.catalog or self.data_dir / "run" / "catalog.toml"

    @property
    def resolved_threads(self) -> int:
        return self.threads or len(os.sched_getaffinity(0))

    @property
    def blob_dir(self) -> Path:
        return self.data_dir / "blobs"

    @property
    def artifact_dir(self) -> Path:
        return self.data_dir / "artifacts"
