"""Labels: what an owner says of a session or a version."""

from typing import Annotated

from pydantic import Field, StringConstraints

from gateway.core.versions import Labels
from gateway.wire.native.schemas.base import Create

MAX_METADATA = 64

MetadataKey = Annotated[str, StringConstraints(min_length=1, max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_METADATA)]


class LabelsCreate(Create):
    """With ``ttl_seconds`` the version expires so long after its save; a session uses a ``name`` once per kind."""

    name: str | None = None
    description: str = ""
    user_metadata: Metadata = Field(default={})
    tags: list[str] = Field(default=[])
    ttl_seconds: int | None = None

    def labels(self) -> Labels:
        """Raises Invalid: names field and limit."""
        return Labels(
            name=self.name,
            description=self.description,
            user_metadata=self.user_metadata,
            tags=tuple(sorted(self.tags)),
            ttl_s=self.ttl_seconds,
        )
