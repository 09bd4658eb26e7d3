"""The gateway's settings: read once at start from the environment (``LOOPLINE_...``), then passed on."""

from pathlib import Path

from pydantic import Field, SecretStr

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
    gap_timeout_s: float = Field(default=60.0, gt=0, description="How long an operation waits for a missing seq")
    undelete_s: float = Field(default=604800.0, ge=0, description="How long a deleted version can be brought back")
    engine_timeout_s: float = Field(default=600.0, gt=0, description="Longest time of one engine request")
    max_running_samples: int = Field(default=4096, ge=1, description="Background samples of one gateway at a time")

    @property
    def resolved_master_key_file(self) -> Path:
        return self.master_key_file or self.data_dir / "master.key"

    @property
    def model_dir(self) -> Path:
        return self.data_dir / "models"
