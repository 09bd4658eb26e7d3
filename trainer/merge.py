"""A full deployable model: the base's files with the adapter merged in, one tensor in memory at a time.

The merge happens in float32 on a copy and is cast once, to the dtype the base has on disk. The live base is never
touched.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gateway.core.errors import Invalid
from trainer.tensorfiles import open_tensors, stream_tensors

_INDEX_NAME = "model.safetensors.index.json"
_COPIED = frozenset({".json", ".jinja", ".txt", ".model"})


class CannotMerge(Invalid):
    """The base's files do not hold a tensor that the adapter changes."""

    default_code = "cannot_merge"


def write_merged(
    base: Path,
    directory: Path,
    masters: Mapping[str, Tensor],
    scale: float,
    *,
    head_path: str,
    embedding_path: str,
    tied: bool,
) -> None:
    """Write ``base`` plus ``scale * B @ A`` for every pair of ``masters`` (names as in ``adapters``).

    A head that is tied to the embeddings becomes a tensor of its own when it is adapted, and the config says so.

    Raises:
        CannotMerge: a base in another format than safetensors, or with other tensor names.
    """
    deltas = {name.removesuffix(".lora_A") for name in masters if name.endswith(".lora_A")}
    untie = tied and head_path in deltas
    shards = sorted(path for path in base.glob("*.safetensors"))
    location = {name: shard for shard in shards for name in _names(shard)}
    source = {f"{path}.weight": f"{path}.weight" for path in deltas}
    if untie:
        source[f"{head_path}.weight"] = f"{embedding_path}.weight"
        location.pop(f"{head_path}.weight", None)
    if missing := sorted(name for name in source.values() if name not in location):
        raise CannotMerge(f"the base has no tensor {missing[0]} in safetensors files")

    def merged(target: str, original: Tensor) -> Tensor:
        path = target.removesuffix(".weight")
        if path not in deltas:
            return original
        low, high = masters[f"{path}.lora_A"].detach(), masters[f"{path}.lora_B"].detach()
        return (original.float() + scale * (high.float() @ low.float()).cpu()).to(original.dtype)

    added = f"{head_path}.weight" if untie else None
    for shard in shards:
        plan = {name: name for name in _names(shard) if location.get(name) == shard}
        if added is not None and location[source[added]] == shard:
            plan[added] = source[added]
            _extend_index(base, directory, added, shard.name)
        _write_shard(shard, directory / shard.name, plan, merged)
    for path in sorted(base.iterdir()):
        if path.suffix in _COPIED and path.name != _INDEX_NAME:
            shutil.copyfile(path, directory / path.name)
    if not (directory / _INDEX_NAME).exists() and (base / _INDEX_NAME).exists():
        shutil.copyfile(base / _INDEX_NAME, directory / _INDEX_NAME)
    if untie:
        config: dict[str, Any] = json.loads((base / "config.json").read_bytes())
        config["tie_word_embeddings"] = False
        (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))


def _names(shard: Path) -> list[str]:
    with open_tensors(shard) as file:
        return file.names()


def _write_shard(shard: Path, target: Path, plan: Mapping[str, str], merged: Callable[[str, Tensor], Tensor]) -> None:
    """Write the tensors that ``plan`` names (target to source name), one after the other."""
    with open_tensors(shard) as file:
        described = {name: file.describe(origin) for name, origin in plan.items()}
        stream_tensors(target, described, lambda name: merged(name, file.tensor(plan[name])))


def _extend_index(base: Path, directory: Path, added: str, shard: str) -> None:
    if not (base / _INDEX_NAME).exists():
        return
    index: dict[str, Any] = json.loads((base / _INDEX_NAME).read_bytes())
    index["weight_map"][added] = shard
    (directory / _INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True))
