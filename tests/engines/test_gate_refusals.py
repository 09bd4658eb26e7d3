"""Adapters that were corrupted after their manifest was written, and hashed again, on the float32 engine.

Everything else is whole: the row, the hashes, the canary. Only the engine's answers, or the numbers in the file, can
tell.
"""

import dataclasses
import hashlib
import json
import re
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gateway.core.adapter_files import CONFIG_NAME, WEIGHTS_NAME
from gateway.core.catalog import Catalog
from gateway.core.clock import SystemClock
from gateway.core.ids import OperationId
from gateway.core.manifest import MANIFEST_NAME, parse_manifest
from gateway.core.payloads import SaveWeights
from gateway.core.results import Failure
from gateway.core.versions import NewVersion, Version, VersionState
from gateway.engines.pool import EnginePool
from gateway.publisher import Publisher
from gateway.store import LocalArtifacts, SqlDatabase
from gateway.store.artifacts import describe_files
from tests.engines.fixtures import base_model_of, until
from tests.engines.reference import CANARY_TOKENS, Reference
from tests.stack import EngineEndpoint
from tests.store.bench import Bench

pytestmark = pytest.mark.engine

SQUARE = ("self_attn.q_proj", "self_attn.o_proj")  # in = out: swapped halves have the right shapes


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> LocalArtifacts:
    return LocalArtifacts(tmp_path_factory.mktemp("artifacts"))


@pytest.fixture(scope="module")
def reference(tiny_model: Path, stored: LocalArtifacts) -> Reference:
    return Reference(tiny_model, stored, base_model="tiny")


@pytest.fixture
async def pool(tiny_engine: EngineEndpoint, stored: LocalArtifacts) -> AsyncIterator[EnginePool]:
    base = base_model_of(tiny_engine)
    async with EnginePool(Catalog(models={base.name: base}), stored, key=tiny_engine.key, timeout_s=120) as opened:
        yield opened


def flipped_byte(directory: Path) -> None:
    """One bit in the exponent of one weight among thousands: 2^-1 becomes 2^7, or the like."""
    path = directory / WEIGHTS_NAME
    content = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    name = next(name for name in sorted(header) if "layers.1.mlp.down_proj.lora_B" in name)
    place = 8 + length + header[name]["data_offsets"][0] + 3
    content[place] ^= 0x04
    path.write_bytes(content)


def swapped_halves(directory: Path) -> None:
    """A and B change places, transposed, where the shapes allow it."""
    tensors = load_file(directory / WEIGHTS_NAME)
    for name in [name for name in tensors if "lora_A" in name and any(path in name for path in SQUARE)]:
        other = name.replace("lora_A", "lora_B")
        tensors[name], tensors[other] = tensors[other].T.contiguous(), tensors[name].T.contiguous()
    save_file(tensors, directory / WEIGHTS_NAME)


def mislabelled_halves(directory: Path) -> None:
    """A and B change names: no shape fits."""
    tensors = load_file(directory / WEIGHTS_NAME)
    other = {"A": "B", "B": "A"}
    named = {re.sub(r"lora_([AB])", lambda m: f"lora_{other[m[1]]}", name): tensor for name, tensor in tensors.items()}
    save_file(named, directory / WEIGHTS_NAME)


def renamed_keys(directory: Path) -> None:
    """Nothing binds: the engine would answer as the base model."""
    tensors = load_file(directory / WEIGHTS_NAME)
    named = {name.replace(".layers.", ".blocks."): tensor for name, tensor in tensors.items()}
    save_file(named, directory / WEIGHTS_NAME)


def not_a_number(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS_NAME)
    name = next(name for name in tensors if "lora_B" in name)
    tensors[name][0, 0] = torch.nan
    save_file(tensors, directory / WEIGHTS_NAME)


def doubled_scale(directory: Path) -> None:
    config = json.loads((directory / CONFIG_NAME).read_bytes())
    config["lora_alpha"] *= 2
    (directory / CONFIG_NAME).write_text(json.dumps(config))


def rehashed(stored: LocalArtifacts, version: Version, damage: Callable[[Path], None]) -> str:
    """Damage a version's files and hash them and the manifest again; return the manifest's new hash."""
    directory = stored.path(version.location)
    damage(directory)
    manifest = parse_manifest((directory / MANIFEST_NAME).read_bytes())
    files = {name: entry for name, entry in describe_files(directory).items() if name != MANIFEST_NAME}
    text = dataclasses.replace(manifest, files=files).to_json()
    (directory / MANIFEST_NAME).write_bytes(text)
    sha256 = hashlib.sha256(text).hexdigest()
    stored.verify(version.location, sha256)
    return sha256


async def final(bench: Bench, id: OperationId) -> bool:
    return (await bench.operation(id)).final


@pytest.mark.parametrize(
    ("damage", "code", "cause"),
    [
        (flipped_byte, "canary_mismatch", "disagree on the canary: mean"),
        (swapped_halves, "canary_mismatch", "disagree on the canary: mean"),
        (mislabelled_halves, "corrupt_artifact", "lora_A"),
        (renamed_keys, "adapter_not_applied|engine_refused_adapter", "effect|cannot compute with this adapter"),
        (not_a_number, "corrupt_artifact", "not finite"),
        (doubled_scale, "adapter_not_applied|canary_mismatch", "times the adapter's effect"),
    ],
    ids=lambda it: getattr(it, "__name__", ""),
)
async def test_what_hashes_cannot_tell_the_gate_refuses_by_its_cause(
    damage: Callable[[Path], None],
    code: str,
    cause: str,
    database: SqlDatabase,
    bench: Bench,
    pool: EnginePool,
    reference: Reference,
    stored: LocalArtifacts,
) -> None:
    good, bad = reference.adapter(5), reference.adapter(6)
    effect = [
        abs(a - b)
        for tokens in CANARY_TOKENS
        for a, b in zip(reference.of(bad, tokens), reference.scores(tokens, None), strict=True)
    ]
    assert sum(effect) / len(effect) > 0.1
    session = await bench.open(base_model="tiny")
    outcomes: list[object] = []
    async with Publisher(database, pool, database.wakeups, SystemClock(), "gateway-1"):
        for version in (good, bad):
            await bench.submit(session, SaveWeights(group="policy"))
            work = await bench.claim(base_model="tiny")
            assert work is not None
            same = {field.name: getattr(version, field.name) for field in dataclasses.fields(NewVersion)}
            staged = NewVersion(**{**same, "group": "policy", "seq": work.operation.seq})
            if version is bad:
                staged = dataclasses.replace(staged, manifest_sha256=rehashed(stored, version, damage))
            await bench.stage(work, version=staged)
            await until(lambda id=work.operation.id: final(bench, id), timeout_s=120)
            outcomes.append((await bench.operation(work.operation.id)).outcome)

    assert not isinstance(outcomes[0], Failure)
    refused = outcomes[1]
    assert isinstance(refused, Failure)
    assert re.fullmatch(code, refused.code), refused
    assert re.search(cause, refused.message), refused
    async with database.read() as unit:
        assert (await unit.versions.get(bench.project_id, bad.id)).state is VersionState.REJECTED
        assert (await unit.sessions.get(bench.project_id, session.id)).latest_version_id == good.id
