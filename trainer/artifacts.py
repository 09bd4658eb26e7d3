"""Versions and snapshots as artefacts: written beside, checksummed, made durable, then visible under a final name.

A location carries the version's or session's opaque id and the epoch of the lease it was written under, so that a
trainer that lost its lease cannot write where the next one does. These functions block: they run in the kernel thread.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from gateway.core.disk import read_failed
from gateway.core.errors import Internal
from gateway.core.ids import VersionId
from gateway.core.manifest import Manifest
from gateway.core.payloads import SaveWeights, Upload
from gateway.core.ports import Artifacts, CorruptArtifact, Lease
from gateway.core.sessions import Session, Snapshot
from gateway.core.versions import NewVersion
from gateway.release import code_version
from gateway.store.artifacts import describe_files
from trainer import dispatch
from trainer.backend import TrainingBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A version whose files are in place. ``complete``: its operation ends here, no publish gate follows."""

    version: NewVersion
    complete: bool


def save_version(
    artifacts: Artifacts,
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
        Unavailable: an upload that it is made of cannot be read now.
    """
    location = f"{version_id}-{lease.epoch}"
    upload = payload.source if isinstance(payload, SaveWeights) else None
    source = None if upload is None else _read_upload(artifacts, upload)
    temporary = artifacts.stage(location)
    try:
        written = dispatch.save(backend, session, payload, temporary, source)
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
                **({} if upload is None else {"imported_sha256": upload.manifest_sha256}),
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


def _read_upload(artifacts: Artifacts, upload: Upload) -> Path:
    try:
        artifacts.verify(upload.location, upload.manifest_sha256)
    except CorruptArtifact as error:
        raise Internal("the uploaded adapter cannot be read; import it again", code="corrupt_artifact") from error
    return artifacts.path(upload.location)


def write_snapshot(artifacts: Artifacts, backend: TrainingBackend, lease: Lease, seq: int) -> Snapshot:
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


def read_snapshot(artifacts: Artifacts, backend: TrainingBackend, session: Session, snapshot: Snapshot) -> None:
    """Make a session resident from its snapshot.

    Raises:
        CorruptArtifact, CorruptState: it is not what was written.
        Unavailable: the store is away, or the disk cannot be read.
    """
    artifacts.verify(snapshot.location, None)
    try:
        backend.restore(session.id, session.lora, artifacts.path(snapshot.location), session.rules)
    except OSError as error:
        raise read_failed(error) from error
