"""Staged versions for engine tests: real artefacts in a real store, under fresh ids."""

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from gateway.core.canary import Canary
from gateway.core.ids import OperationId, ProjectId, SessionId, VersionId, new_version_id
from gateway.core.manifest import Manifest
from gateway.core.scripted import BASE_FINGERPRINT, SCRIPTED_NAME, scripted_file, scripted_scores
from gateway.core.sessions import LoraConfig
from gateway.core.versions import Labels, Version, VersionKind, VersionState
from gateway.store.artifacts import LocalArtifacts, describe_files

SEQUENCE = (97, 98, 99, 100, 101, 102)


def stage(
    artifacts: LocalArtifacts, files: Mapping[str, bytes], canary: Canary | None, *, base_model: str, lora: LoraConfig
) -> Version:
    """Write an adapter version as a trainer does and return its row."""
    version_id = new_version_id()
    directory = artifacts.stage(version_id)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    manifest = Manifest(
        version_id=version_id,
        kind=VersionKind.ADAPTER,
        base_model=base_model,
        files=describe_files(directory),
        canary=canary,
    )
    manifest_sha256 = artifacts.commit(directory, manifest)
    return make_version(
        version_id, base_model=base_model, lora=lora, manifest_sha256=manifest_sha256, size_bytes=manifest.size_bytes
    )


def stage_scripted(
    artifacts: LocalArtifacts,
    fingerprint: str,
    *,
    base_model: str = "scripted",
    scored_as: str | None = None,
    tokens: Sequence[Sequence[int]] = (SEQUENCE,),
) -> Version:
    """Stage an adapter of the scripted engine; ``scored_as`` makes its canary that of another fingerprint."""
    sequences = tuple(tuple(sequence) for sequence in tokens)
    canary = Canary(
        tokens=sequences,
        logprobs=tuple(scripted_scores(scored_as or fingerprint, sequence) for sequence in sequences),
        base_logprobs=tuple(scripted_scores(BASE_FINGERPRINT, sequence) for sequence in sequences),
    )
    files = {SCRIPTED_NAME: scripted_file(fingerprint)}
    return stage(artifacts, files, canary, base_model=base_model, lora=make_lora())


def make_lora(*, rank: int = 8, train_unembed: bool = False) -> LoraConfig:
    return LoraConfig(rank=rank, alpha=16, train_attn=True, train_mlp=True, train_unembed=train_unembed, seed=0)


def make_version(
    version_id: VersionId, *, base_model: str, lora: LoraConfig, manifest_sha256: str, size_bytes: int
) -> Version:
    return Version(
        id=version_id,
        project_id=ProjectId("proj-tests"),
        group="tests",
        number=1,
        kind=VersionKind.ADAPTER,
        state=VersionState.STAGED,
        session_id=SessionId("sess-tests"),
        operation_id=OperationId("op-tests"),
        parent_id=None,
        base_model=base_model,
        lora=lora,
        seq=1,
        optimizer_step=1,
        location=version_id,
        manifest_sha256=manifest_sha256,
        size_bytes=size_bytes,
        labels=Labels(),
        base_sha256=None,
        code_version=None,
        created_at=datetime.now(UTC),
        published_at=None,
        expires_at=None,
        deleted_at=None,
        purged_at=None,
        canary=None,
    )


def rejected(version: Version) -> Version:
    return dataclasses.replace(version, state=VersionState.REJECTED)
