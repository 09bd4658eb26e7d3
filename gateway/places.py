"""Where a deployment's processes meet: the settings that gateway and trainer must read alike.

A leaf: every process may import it, the trainer included, which sees nothing else of the gateway above its store.
"""

from pathlib import Path
from typing import Self

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

_PREFIX = "LOOPLINE_"


class WrongSettings(Exception):
    """Variables of the environment that cannot be used; the message names them and what they must be."""


class Places(BaseSettings):
    """Database, catalogue and directories. Paths that are unset lie under ``data_dir``."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, extra="ignore", frozen=True)

    data_dir: Path = Field(default=Path(".loopline"), description="Database, blobs, artefacts, models, logs")
    database_url: str | None = Field(default=None, description="SQLAlchemy URL; unset: SQLite under data_dir")
    catalog: Path | None = Field(default=None, description="Catalogue of base models; unset: run/catalog.toml")
    object_store: str | None = Field(
        default=None,
        pattern=r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[a-zA-Z0-9._/-]{1,200})?$",
        description="s3://bucket/prefix for artefacts; unset: the data directory alone",
    )
    object_store_endpoint: str | None = Field(default=None, description="URL of a store that is not Amazon's")
    object_store_cache_bytes: int = Field(
        default=64 * 1024**3,
        ge=0,
        description="Bytes of its artefacts kept here; what is in use stays beyond it",
    )
    allow_weak_durability: bool = Field(
        default=False, description="Use also a database that may lose acknowledged work when the power fails"
    )
    traces: bool = Field(default=False, description="Send OpenTelemetry traces, as the OTEL_ variables say")

    @classmethod
    def read(cls, data_dir: Path | None = None) -> Self:
        """Read the settings from the environment; ``data_dir`` wins over it.

        Raises:
            WrongSettings: a value is of another kind or out of its range.
        """
        try:
            return cls() if data_dir is None else cls(data_dir=data_dir)
        except ValidationError as error:
            wrong = error.errors(include_url=False, include_context=False, include_input=False)
            said = (f"{_PREFIX}{str(one['loc'][0]).upper()}: {one['msg']}" for one in wrong)
            raise WrongSettings("; ".join(said)) from None

    @property
    def resolved_database_url(self) -> str:
        return self.database_url or f"sqlite:///{self.data_dir.absolute() / 'loopline.db'}"

    @property
    def resolved_catalog(self) -> Path:
        return self.catalog or self.data_dir / "run" / "catalog.toml"

    @property
    def blob_dir(self) -> Path:
        return self.data_dir / "blobs"

    @property
    def artifact_dir(self) -> Path:
        return self.data_dir / "artifacts"
