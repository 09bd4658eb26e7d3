"""The gateway's settings: read once at start from the environment (``LOOPLINE_...``), then passed on."""

from pathlib import Path

from pydantic import Field, SecretStr

from gateway.core.limits import Limit, Limits
from gateway.core.sessions import MAX_TTL_S
from gateway.places import Places


class Settings(Places):
    """Every setting with its default. Paths that are unset lie under ``data_dir``."""

    prices: Path | None = Field(
        default=None, description="Price list to apply at start unless it was before; unset: the one that ships"
    )
    host: str = Field(default="127.0.0.1", description="Address to listen on")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on")
    master_key_file: Path | None = Field(default=None, description="File of the key that API keys derive from")
    master_key: SecretStr | None = Field(default=None, description="The same, injected; wins over the file")
    engine_key: SecretStr = Field(default=SecretStr(""), description="Bearer key of the engines, new at each boot")
    max_body_bytes: int = Field(default=64 * 1024 * 1024, ge=1024, description="Largest request body, decoded")
    max_import_bytes: int = Field(default=4 * 1024**3, ge=1024, description="Largest adapter to import, unpacked")
    gap_timeout_s: float = Field(default=60.0, gt=0, description="How long an operation waits for a missing seq")
    undelete_s: float = Field(default=604800.0, ge=0, description="How long a deleted version can be brought back")
    sagemaker_idle_s: int = Field(
        default=86400, ge=60, le=MAX_TTL_S, description="How long a session of the SageMaker dialect may be idle"
    )
    engine_timeout_s: float = Field(default=600.0, gt=0, description="Longest time of one engine request")
    engine_sequences: int = Field(
        default=64, ge=1, description="Sequences in an engine at a time, from here: its --max-num-seqs"
    )
    max_running_samples: int = Field(default=4096, ge=1, description="Background samples of one gateway at a time")

    limit_requests_per_minute: int | None = Field(
        default=60000, ge=1, description="Calls of a project that work or change something, by the minute"
    )
    limit_tokens_per_minute: int | None = Field(
        default=None, ge=1, description="Prompt, sampled and trained tokens of a project by the minute; unset: any"
    )
    limit_sessions: int | None = Field(default=1000, ge=1, description="Live sessions of a project")
    limit_queued_operations: int | None = Field(default=10000, ge=1, description="Waiting operations of a project")
    limit_versions: int | None = Field(default=100000, ge=1, description="Versions of a project whose files are kept")
    limit_stored_bytes: int | None = Field(default=None, ge=1, description="Bytes of those files; unset: any")
    limit_n: int | None = Field(default=None, ge=1, description="Samples per prompt; unset: what the dialect allows")
    limit_max_tokens: int | None = Field(default=None, ge=1, description="Tokens of one sample; unset: the context")
    limit_stop: int | None = Field(default=None, ge=1, description="Stop entries; unset: what the dialect allows")
    limit_prompts: int | None = Field(default=None, ge=1, description="Prompts of a request; unset: as the dialect")

    @property
    def limits(self) -> Limits:
        """What every project may have, where it has no value of its own."""
        set_here = {limit: getattr(self, f"limit_{limit.value}", None) for limit in Limit}
        return {limit: value for limit, value in set_here.items() if value is not None}

    @property
    def resolved_master_key_file(self) -> Path:
        return self.master_key_file or self.data_dir / "master.key"

    @property
    def model_dir(self) -> Path:
        return self.data_dir / "models"
