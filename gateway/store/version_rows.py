"""Rows of ``versions``: how a version is read from one, and how its labels are written."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, RowMapping, and_, select

from gateway.core.ids import OperationId, ProjectId, SessionId, VersionId
from gateway.core.versions import CanaryReport, Labels, Version, VersionKind, VersionState
from gateway.store.lora import lora_of
from gateway.store.text import missing, require_id, require_storable
from gateway.store.transaction import Transaction
from gateway.store.version_tables import versions


async def read_version(transaction: Transaction, project_id: ProjectId, version_id: VersionId) -> Version:
    """Raises NotFound, also for a stranger's."""
    require_id(version_id, "version")
    row = await transaction.first(
        select(versions).where(and_(versions.c.id == version_id, versions.c.project_id == project_id))
    )
    if row is None:
        raise missing("version", version_id)
    return version_of(row)


def standing() -> ColumnElement[bool]:
    """The versions that were neither rejected nor deleted."""
    return and_(versions.c.state != VersionState.REJECTED, versions.c.deleted_at.is_(None))


def label_columns(labels: Labels, saved_at: datetime) -> dict[str, Any]:
    """Return the columns of ``labels``, of a version saved at ``saved_at``.

    Raises:
        Invalid: a text that the databases cannot hold.
    """
    require_storable(labels.description, "description")
    for key, value in labels.user_metadata.items():
        require_storable(key + value, f"user_metadata.{key[:64]}")
    return {
        "name": labels.name,
        "description": labels.description,
        "user_metadata": dict(labels.user_metadata) or None,
        "tags": tags_text(labels.tags),
        "ttl_s": labels.ttl_s,
        "expires_at": None if labels.ttl_s is None else saved_at + timedelta(seconds=labels.ttl_s),
    }


def tags_text(tags: Sequence[str]) -> str | None:
    """Return tags as one text, in which `` tag `` is found with its spaces."""
    return f" {' '.join(sorted(tags))} " if tags else None


def version_of(row: RowMapping) -> Version:
    """Read a row of ``versions``."""
    return Version(
        id=VersionId(row["id"]),
        project_id=ProjectId(row["project_id"]),
        group=row["group_name"],
        number=row["number"],
        kind=VersionKind(row["kind"]),
        state=VersionState(row["state"]),
        session_id=SessionId(row["session_id"]),
        operation_id=OperationId(row["operation_id"]),
        parent_id=None if row["parent_id"] is None else VersionId(row["parent_id"]),
        base_model=row["base_model"],
        lora=lora_of(row),
        seq=row["seq"],
        optimizer_step=row["optimizer_step"],
        location=row["location"],
        manifest_sha256=row["manifest_sha256"],
        size_bytes=row["size_bytes"],
        labels=Labels(
            name=row["name"],
            description=row["description"],
            user_metadata=row["user_metadata"] or {},
            tags=tuple((row["tags"] or "").split()),
            ttl_s=row["ttl_s"],
        ),
        base_sha256=row["base_sha256"],
        code_version=row["code_version"],
        created_at=row["created_at"],
        published_at=row["published_at"],
        expires_at=row["expires_at"],
        deleted_at=row["deleted_at"],
        purged_at=row["purged_at"],
        canary=None if row["canary"] is None else report_of(row["canary"]),
    )


def report_of(stored: Mapping[str, Any]) -> CanaryReport:
    """Read a report; the oldest ones have neither a control nor the mean's own tolerance."""
    absent: dict[str, Any] = {
        "mean_tolerance": stored["tolerance"],
        "control_mean_difference": 0.0,
        "effect_ratio": 1.0,
    }
    return CanaryReport(**{**absent, **stored})
