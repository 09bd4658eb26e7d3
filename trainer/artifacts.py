"""Versions and snapshots as artefacts: written beside, checksummed, made durable, then visible under a final name.

A location carries the version's or session's opaque id and the epoch of the lease it was written under, so that a
trainer that lost its lease cannot write where the next one does. These functions block: they run in the kernel thread.
"""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from gateway.core.ids import VersionId
from gateway.core.manifest import MANIFEST_NAME, Manifest
from gateway.core.ports import Artifacts, Lease
from gateway.core.sessions import Session, Snapshot
from gateway.core.versions import NewVersion
from gateway.release import code_version
from gateway.store.artifacts import describe_files
from trainer import dispatch
from trainer.backend import TrainingBackend


class ArtifactWriter(Artifacts, Protocol):
    """The store's side: see ``gateway.store.artifacts``."""

    def stage(self, location: str) -> Path: ...

    def commit(self, temporary: Path, manifest: Manifest) -> str: ...

    def discard(self, temporary: Path) -> None: ...

    def remove(self, location: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A version whose files are in place. ``complete``: its operation ends here, no publish gate follows."""

    version: NewVersion
    complete: bool


def save_version(
    artifacts: ArtifactWriter,
    backend: TrainingBackend,
    session: Session,
    payload: dispatch.Saved,
    *,
    version_id: VersionId,
    lease: Lease,
    seq: int,
) -> Staged:
    """Run a save and commit its files; one that fails leaves nothing behind.

    Raises:
        GatewayError: the backend cannot write this version.
    """
    location = f"{version_id}-{lease.epoch}"
    temporary = artifacts.stage(location)
    try:
        written = dispatch.save(backend, session, payload, temporary)
        manifest = Manifest(
            version_id=version_id,
            kind=written.kind.value,
            base_model=session.base_model,
            files=describe_files(temporary),
            canary=written.canary,
            lineage={
                "session_id": session.id,
                "seq": seq,
                "optimizer_step": written.optimizer_step,
                "lora": asdict(session.lora),
                "base_sha256": backend.base_sha256,
                "code_version": code_version(),
            },
        )
        sha256 = artifacts.commit(temporary, manifest)
    finally:
        artifacts.discard(temporary)
    version = NewVersion(
        id=version_id,
        kind=written.kind,
        group=written.group,
        base_model=session.base_model,
        lora=session.lora,
        seq=seq,
        optimizer_step=written.optimizer_step,
        location=location,
        manifest_sha256=sha256,
        size_bytes=manifest.size_bytes,
        labels=written.labels,
        base_sha256=backend.base_sha256,
        code_version=code_version(),
    )
    return Staged(version=version, complete=written.complete)


def write_snapshot(artifacts: ArtifactWriter, backend: TrainingBackend, lease: Lease, seq: int) -> Snapshot:
    """Write a session's state as of ``seq``. One that this lease wrote already has the same content and is kept."""
    location = f"snapshot-{lease.session_id}-{lease.epoch}-{seq}"
    if not artifacts.path(location).exists():
        temporary = artifacts.stage(location)
        try:
            backend.write_snapshot(lease.session_id, temporary)
            files = describe_files(temporary)
            artifacts.commit(
                temporary, Manifest(version_id=location, kind="snapshot", base_model="", files=files, canary=None)
            )
        finally:
            artifacts.discard(temporary)
    return Snapshot(seq=seq, location=location)


def read_snapshot(artifacts: ArtifactWriter, backend: TrainingBackend, session: Session, snapshot: Snapshot) -> None:
    """Make a session resident from its snapshot.

    Raises:
        CorruptArtifact, CorruptState: it is not what was written.
    """
    directory = artifacts.path(snapshot.location)
    manifest = directory / MANIFEST_NAME
    recorded = hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.exists() else ""
    artifacts.verify(snapshot.location, recorded)
    backend.restore(session.id, session.lora, directory, session.rules)
