"""A full deployable model: the base's files with the adapter merged in, one tensor in memory at a time.

The merge happens in float32 on a copy and is cast once, to the dtype the base has on disk. The live base is never
touched.
"""

import json
import re
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

_INDEX_NAME = "model.safetensors.index.json"
_COPIED = frozenset({".json", ".jinja", ".txt", ".model"})


class CannotMerge(Exception):
    """The base's files do not hold a tensor that the adapter changes."""


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
        _stream(shard, directory / shard.name, plan, merged)
        if added in plan:
            _extend_index(base, directory, added, shard.name)
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
    with safe_open(shard, framework="pt") as file:
        return list(file.keys())


def _extend_index(base: Path, directory: Path, added: str, shard: str) -> None:
    if not (base / _INDEX_NAME).exists():
        return
    index: dict[str, Any] = json.loads((base / _INDEX_NAME).read_bytes())
    index["weight_map"][added] = shard
    (directory / _INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True))


def _stream(shard: Path, target: Path, plan: Mapping[str, str], merged: Callable[[str, Tensor], Tensor]) -> None:
    """Write a safetensors file with the tensors ``plan`` names (target to source name), one after the other."""
    with safe_open(shard, framework="pt") as file:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, source in plan.items():
            view = file.get_slice(source)
            shape, dtype = view.get_shape(), view.get_dtype()
            size = _size_bytes(shape, dtype)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with target.open("wb") as out:
            out.write(struct.pack("<Q", len(text)))
            out.write(text)
            for name, source in plan.items():
                for piece in _bytes(merged(name, file.get_tensor(source))):
                    out.write(piece)


def _size_bytes(shape: list[int], dtype: str) -> int:
    bits = int(re.sub(r"\D", "", dtype.partition("_")[0]) or 8)  # F32, BF16, I64, F8_E4M3, BOOL
    count = 1
    for extent in shape:
        count *= extent
    return count * bits // 8


def _bytes(tensor: Tensor) -> Iterator[memoryview]:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    yield memoryview(flat.numpy())
