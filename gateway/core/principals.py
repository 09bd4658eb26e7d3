"""Who is calling. Every object belongs to a project; a principal sees its own project and nothing else."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from gateway.core.ids import KeyId, ProjectId


class Scope(StrEnum):
    """What a key may do. Every key may read what is its project's; ``admin`` includes the others."""

    READ_ONLY = "read-only"  # and nothing else
    INFERENCE = "inference"
    TRAIN = "train"
    ADMIN = "admin"


ALL_SCOPES = frozenset(Scope) - {Scope.READ_ONLY}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """An API key as recorded: its secret is derived from the master key and never stored."""

    id: KeyId
    project_id: ProjectId
    name: str
    scopes: frozenset[Scope]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None

    def ended(self, at: datetime) -> bool:
        """Say whether the key opens nothing any more at ``at``."""
        return self.revoked_at is not None or (self.expires_at is not None and self.expires_at <= at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The caller of one request."""

    project_id: ProjectId
    key_id: KeyId
    scopes: frozenset[Scope]
