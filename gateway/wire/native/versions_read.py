"""Versions as this dialect's responses."""

from collections.abc import Sequence
from dataclasses import asdict

from gateway.core.addresses import arn, tinker_path
from gateway.core.ports import UnitOfWork
from gateway.core.versions import CanaryReport, Check, Group, Version, VersionEvent
from gateway.wire.native.render import lora_read
from gateway.wire.native.schemas.model_packages import CanaryRead, CheckRead, EventRead, GroupRead, VersionRead


async def version_read(unit: UnitOfWork, version: Version) -> VersionRead:
    return (await versions_read(unit, [version]))[0]


async def versions_read(unit: UnitOfWork, versions: Sequence[Version]) -> list[VersionRead]:
    ids = [version.id for version in versions]
    aliases, checks = await unit.registry.aliases_of(ids), await unit.upkeep.checks(ids)
    return [_read(version, aliases.get(version.id, ()), checks.get(version.id, ())) for version in versions]


def _read(version: Version, aliases: Sequence[str], checks: Sequence[Check]) -> VersionRead:
    labels = version.labels
    return VersionRead(
        id=version.id,
        address=version.address,
        group=version.group,
        number=version.number,
        kind=version.kind,
        state=version.state,
        session_id=version.session_id,
        operation_id=version.operation_id,
        parent_id=version.parent_id,
        base_model=version.base_model,
        lora=lora_read(version.lora),
        seq=version.seq,
        optimizer_step=version.optimizer_step,
        manifest_sha256=version.manifest_sha256,
        fingerprint=version.fingerprint,
        size_bytes=version.size_bytes,
        arn=arn(version),
        tinker_path=tinker_path(version, version.session_id),
        aliases=list(aliases),
        name=labels.name,
        description=labels.description,
        user_metadata=dict(labels.user_metadata),
        tags=list(labels.tags),
        ttl_seconds=labels.ttl_s,
        base_sha256=version.base_sha256,
        code_version=version.code_version,
        created_at=version.created_at,
        published_at=version.published_at,
        expires_at=version.expires_at,
        deleted_at=version.deleted_at,
        purged_at=version.purged_at,
        canary=_canary_read(version.canary),
        checks=[check_read(check) for check in checks],
    )


def check_read(check: Check) -> CheckRead:
    return CheckRead(
        engine=check.engine,
        occasion=check.occasion,
        at=check.at,
        passed=check.report is not None,
        report=_canary_read(check.report),
        failure=check.failure,
    )


def _canary_read(report: CanaryReport | None) -> CanaryRead | None:
    return None if report is None else CanaryRead(**asdict(report))


def group_read(group: Group) -> GroupRead:
    return GroupRead(
        name=group.name,
        versions=group.versions,
        size_bytes=group.size_bytes,
        created_at=group.created_at,
        latest={kind.value: number for kind, number in group.latest.items()},
        aliases=dict(group.aliases),
    )


def event_read(group: str, event: VersionEvent) -> EventRead:
    return EventRead(
        id=event.id,
        version=f"{group}@{event.number}",
        version_id=event.version_id,
        event=event.event,
        alias=event.alias,
        previous=event.previous,
        key_id=event.key_id,
        at=event.at,
    )
