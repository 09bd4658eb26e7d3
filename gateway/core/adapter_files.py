"""A LoRA adapter as files: PEFT's ``adapter_config.json`` and ``adapter_model.safetensors``, read without torch.

Engines load what they are given: a missing half, a wrong shape, a NaN or a setting they ignore is accepted there and
answers wrongly, or ends the engine. So every adapter is read here first, whoever wrote it. Nothing is executed, no
pickle is ever opened, and no size that a file announces is believed before it was compared with the file's own.
"""

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from gateway.core.errors import Invalid

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
PREFIX = "base_model.model."

MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 16 << 20
_CHUNK_BYTES = 8 << 20
_MODULE = re.compile(r"base_model\.model\.((?:[A-Za-z0-9_]+\.)*[A-Za-z0-9_]+)\.lora_([AB])\.weight")
_WIDTH = {"F32": 4, "BF16": 2, "F16": 2}

# What a config may say. Every other field must say nothing (null, false, empty).
_FREE = frozenset(
    {"auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "peft_type", "peft_version"}
    | {"megatron_core", "qalora_group_size", "revision", "runtime_config", "task_type", "eva_config"}
    | {"r", "lora_alpha", "use_rslora", "target_modules", "bias", "init_lora_weights", "ensure_weight_tying"}
)


class BadAdapter(Invalid):
    """The files are not an adapter that can be served and trained; the text says what is wrong."""

    default_code = "bad_adapter"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLayout:
    """What an adapter is: its rank and scale, and the modules it changes (path in the base model to (out, in))."""

    rank: int
    alpha: float
    use_rslora: bool
    modules: Mapping[str, tuple[int, int]]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_adapter(directory: Path) -> AdapterLayout:
    """Read and check both files to the last number.

    Raises:
        BadAdapter: names file, field or tensor.
        OSError: a file cannot be read.
    """
    config = _config(directory / CONFIG_NAME)
    rank = config["r"]
    with (directory / WEIGHTS_NAME).open("rb") as file:
        offset, entries = _entries(file)
        modules = _modules(entries, rank)
        for name, entry in entries.items():
            if not _finite(file, offset, entry):
                raise BadAdapter(f"{name} holds a number that is not finite", field=name)
    targets = {path.rpartition(".")[2] for path in modules}
    said = config["target_modules"]
    if isinstance(said, list) and (
        odd := sorted(targets ^ {name.rpartition(".")[2] for name in cast("list[str]", said)})
    ):
        raise BadAdapter(f"target_modules and the tensors disagree about {odd[0]}", field="target_modules")
    return AdapterLayout(
        rank=rank,
        alpha=float(config["lora_alpha"]),
        use_rslora=bool(config.get("use_rslora")),
        modules=modules,
        dtype=next(iter(entries.values())).dtype,
    )


def _config(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise BadAdapter(f"{CONFIG_NAME} is larger than {MAX_CONFIG_BYTES} bytes", field=CONFIG_NAME)
    try:
        document: Any = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BadAdapter(f"{CONFIG_NAME} is not JSON", field=CONFIG_NAME) from error
    if not isinstance(document, dict):
        raise BadAdapter(f"{CONFIG_NAME} is not an object", field=CONFIG_NAME)
    config = cast("dict[str, Any]", document)
    rank, alpha, targets = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
    if type(rank) is not int or not 1 <= rank <= 4096:
        raise BadAdapter("r must be a whole number of at least 1", field="r")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < math.inf:
        raise BadAdapter("lora_alpha must be a number above 0", field="lora_alpha")
    if not (isinstance(targets, str) or (isinstance(targets, list) and all(map(_is_text, cast("list[Any]", targets))))):
        raise BadAdapter("target_modules must be a list of names", field="target_modules")
    if config.get("peft_type") != "LORA":
        raise BadAdapter("peft_type must be LORA", field="peft_type")
    if config.get("bias", "none") != "none":
        raise BadAdapter("an adapter with bias is not supported", field="bias")
    if config.get("init_lora_weights") not in (None, True, False, "gaussian"):
        raise BadAdapter("init_lora_weights that change the base model are not supported", field="init_lora_weights")
    for name, value in config.items():
        if name not in _FREE and value not in (None, [], {}, "", "none") and value is not False:
            raise BadAdapter(f"{name[:80]} is set, which is not supported", field=name[:80])
    return config


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _entries(file: BinaryIO) -> tuple[int, dict[str, _Entry]]:
    """Return where the data starts, and the tensors, which must fill the file without gap or overlap."""
    size = file.seek(0, 2)
    file.seek(0)
    prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise BadAdapter(f"{WEIGHTS_NAME} is not a safetensors file", field=WEIGHTS_NAME)
    try:
        header: Any = json.loads(file.read(length))
        entries = {
            name: _Entry(
                dtype=fields["dtype"],
                shape=tuple(fields["shape"]),
                start=fields["data_offsets"][0],
                end=fields["data_offsets"][1],
            )
            for name, fields in header.items()
            if name != "__metadata__"
        }
        at = 0
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
            count = math.prod(entry.shape)
            if entry.dtype not in _WIDTH:
                raise BadAdapter(f"{name[:200]} is {str(entry.dtype)[:20]}; adapters are F32, BF16 or F16", field=name)
            if any(type(extent) is not int or extent < 0 for extent in entry.shape) or (entry.start, entry.end) != (
                at,
                at + count * _WIDTH[entry.dtype],
            ):
                raise BadAdapter(f"{name[:200]} does not lie where its shape says", field=name)
            at = entry.end
    except BadAdapter:
        raise
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise BadAdapter(f"the header of {WEIGHTS_NAME} cannot be read", field=WEIGHTS_NAME) from error
    if not entries or 8 + length + at != size:
        raise BadAdapter(f"{WEIGHTS_NAME} holds {size} bytes, its tensors {8 + length + at}", field=WEIGHTS_NAME)
    return 8 + length, entries


def _modules(entries: Mapping[str, _Entry], rank: int) -> dict[str, tuple[int, int]]:
    sides: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, entry in entries.items():
        found = _MODULE.fullmatch(name)
        if found is None:
            raise BadAdapter(f"{name[:200]} is no tensor of a LoRA adapter", field=name[:200])
        sides.setdefault(found[1], {})[found[2]] = entry.shape
    modules: dict[str, tuple[int, int]] = {}
    for path, shapes in sides.items():
        for side in "AB":
            if side not in shapes:
                raise BadAdapter(f"{path} has no lora_{side}", field=path)
        A, B = shapes["A"], shapes["B"]
        if len(A) != 2 or len(B) != 2 or A[0] != rank or B[1] != rank or 0 in (*A, *B):
            raise BadAdapter(
                f"{path} has lora_A {list(A)} and lora_B {list(B)}; with rank {rank} they must be [{rank}, in] and "
                f"[out, {rank}]",
                field=path,
            )
        modules[path] = (B[0], A[1])
    return modules


def _finite(file: BinaryIO, offset: int, entry: _Entry) -> bool:
    """Say whether no number has an exponent of all ones (infinite, or not a number); by whole bytes, so it is fast."""
    width = _WIDTH[entry.dtype]
    file.seek(offset + entry.start)
    left = entry.end - entry.start
    while left:
        chunk = file.read(min(left, _CHUNK_BYTES))
        if not chunk:
            return False
        left -= len(chunk)
        high = chunk[width - 1 :: width]
        if entry.dtype == "F16":
            suspects = high.translate(_HALF)
        else:  # 8 exponent bits: 7 in the highest byte, 1 on top of the next
            upper, lower = high.translate(_UPPER), chunk[width - 2 :: width].translate(_LOWER)
            suspects = (int.from_bytes(upper, "little") & int.from_bytes(lower, "little")).to_bytes(len(high), "little")
        if suspects.count(0) != len(suspects):
            return False
    return True


_UPPER = bytes(byte & 0x7F == 0x7F for byte in range(256))
_LOWER = bytes(byte >= 0x80 for byte in range(256))
_HALF = bytes(byte & 0x7C == 0x7C for byte in range(256))
