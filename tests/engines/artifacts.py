"""Staged versions for engine tests: real directories with real manifests."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gateway.core.canary import Canary
from gateway.core.ids import OperationId, ProjectId, SessionId, new_version_id
from gateway.core.manifest import MANIFEST_NAME, FileEntry, Manifest, parse_manifest
from gateway.core.ports import CorruptArtifact
from gateway.core.scripted import BASE_FINGERPRINT, SCRIPTED_NAME, scripted_file, scripted_scores
from gateway.core.sessions import LoraConfig
from gateway.core.versions import Version, VersionKind, VersionState


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """Artefacts in one folder."""

    root: Path

    def path(self, location: str) -> Path:
        return self.root / location

    def verify(self, location: str, manifest_sha256: str) -> Manifest:
        try:
            text = (self.path(location) / MANIFEST_NAME).read_bytes()
            manifest = parse_manifest(text)
            found = {name: sha256((self.path(location) / name).read_bytes()) for name in manifest.files}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorruptArtifact(f"{location}: {error}") from error
        if sha256(text) != manifest_sha256 or any(found[name] != e.sha256 for name, e in manifest.files.items()):
            raise CorruptArtifact(f"{location}: a checksum differs")
        return manifest

    def stage(
        self,
        files: Mapping[str, bytes],
        canary: Canary | None,
        *,
        base_model: str,
        lora: LoraConfig,
        state: VersionState = VersionState.STAGED,
    ) -> Version:
        """Write a version under a fresh id."""
        version_id = new_version_id()
        directory = self.path(version_id)
        directory.mkdir(parents=True)
        for name, content in files.items():
            (directory / name).write_bytes(content)
        manifest = Manifest(
            version_id=version_id,
            kind=VersionKind.ADAPTER,
            base_model=base_model,
            files={name: FileEntry(sha256=sha256(c), size_bytes=len(c)) for name, c in files.items()},
            canary=canary,
        )
        (directory / MANIFEST_NAME).write_bytes(manifest.to_json())
        return Version(
            id=version_id,
            project_id=ProjectId("proj-tests"),
            group="tests",
            number=1,
            kind=VersionKind.ADAPTER,
            state=state,
            session_id=SessionId("sess-tests"),
            operation_id=OperationId("op-tests"),
            parent_id=None,
            base_model=base_model,
            lora=lora,
            seq=1,
            optimizer_step=1,
            location=version_id,
            manifest_sha256=sha256(manifest.to_json()),
            size_bytes=manifest.size_bytes,
            description="",
            created_at=datetime.now(UTC),
            published_at=None,
            canary=None,
        )

    def stage_scripted(
        self,
        fingerprint: str,
        *,
        base_model: str,
        scored_as: str | None = None,
        tokens: Sequence[Sequence[int]] = ((97, 98, 99, 100, 101, 102),),
    ) -> Version:
        """Stage an adapter of the scripted engine; ``scored_as`` makes its canary another fingerprint's."""
        sequences = tuple(tuple(sequence) for sequence in tokens)
        canary = Canary(
            tokens=sequences,
            logprobs=tuple(scripted_scores(scored_as or fingerprint, sequence) for sequence in sequences),
            base_logprobs=tuple(scripted_scores(BASE_FINGERPRINT, sequence) for sequence in sequences),
        )
        return self.stage({SCRIPTED_NAME: scripted_file(fingerprint)}, canary, base_model=base_model, lora=make_lora())


def make_lora(*, rank: int = 8, train_unembed: bool = False) -> LoraConfig:
    return LoraConfig(rank=rank, alpha=16, train_attn=True, train_mlp=True, train_unembed=train_unembed, seed=0)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
