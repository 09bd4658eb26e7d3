"""Session state as files: ``state.safetensors`` for the tensors, ``state.json`` for the rest. No pickle.

Tensor names: ``weights/<name>``, ``first/<name>``, ``second/<name>`` and, in snapshots, ``window/<name>``; names as in
``adapters``. Everything is float32, so that reading back is bit-exact.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gateway.core.sessions import LoraConfig
from trainer.backend import CorruptState
from trainer.optim import Moments
from trainer.tensorfiles import read_tensors, stream_tensors

TENSORS_NAME = "state.safetensors"
RECORD_NAME = "state.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Everything a session is. Lists are parallel to ``weights``."""

    lora: LoraConfig
    weights: Mapping[str, Tensor]
    moments: Moments
    window: Sequence[Tensor] | None
    recent: tuple[tuple[int, ...], ...]


def write(directory: Path, state: State) -> None:
    """Write both files into ``directory``. Making them durable and visible is the artefact store's part."""
    groups = [
        ("weights", list(state.weights.values())),
        ("first", state.moments.first),
        ("second", state.moments.second),
    ]
    if state.window is not None:
        groups.append(("window", list(state.window)))
    tensors = {
        f"{group}/{name}": tensor
        for group, values in groups
        for name, tensor in zip(state.weights, values, strict=True)
    }
    described = {name: (tuple(tensor.shape), "F32") for name, tensor in tensors.items()}
    stream_tensors(directory / TENSORS_NAME, described, lambda name: tensors[name].to(torch.float32))
    record = {
        "format": _FORMAT,
        "lora": asdict(state.lora),
        "step": state.moments.step,
        "window": state.window is not None,
        "recent": state.recent,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    (directory / RECORD_NAME).write_text(json.dumps(record, sort_keys=True, indent=1))


def read_lora(directory: Path) -> LoraConfig:
    """Return the config of the session that wrote this state.

    Raises:
        CorruptState: the record is missing or none.
        OSError: the disk cannot be read.
    """
    try:
        record: dict[str, Any] = json.loads((directory / RECORD_NAME).read_bytes())
        return LoraConfig(**record["lora"])
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise CorruptState(f"session state cannot be read: {error}") from error


def read(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> State:
    """Read what ``write`` wrote for an adapter with tensors of ``shapes``.

    Raises:
        CorruptState: a file is missing, or contents, names, shapes or types are not exactly the expected ones.
        OSError: the disk cannot be read.
    """
    try:
        record: dict[str, Any] = json.loads((directory / RECORD_NAME).read_bytes())
        tensors = read_tensors(directory / TENSORS_NAME)
    except (FileNotFoundError, ValueError) as error:
        raise CorruptState(f"session state cannot be read: {error}") from error
    if record.get("format") != _FORMAT:
        raise CorruptState(f"session state has format {record.get('format')!r}, expected {_FORMAT}")
    groups = ("weights", "first", "second", *(("window",) if record["window"] else ()))
    expected = {f"{group}/{name}": shape for group in groups for name, shape in shapes.items()}
    if wrong := sorted(expected.keys() ^ tensors.keys()):
        raise CorruptState(f"session state has missing or unexpected tensors: {', '.join(wrong[:5])}")
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape or tensors[name].dtype is not torch.float32:
            raise CorruptState(f"{name} is {tensors[name].dtype} {list(tensors[name].shape)}, expected {list(shape)}")

    def group(name: str) -> list[Tensor]:
        return [tensors[f"{name}/{tensor}"] for tensor in shapes]

    return State(
        lora=LoraConfig(**record["lora"]),
        weights=dict(zip(shapes, group("weights"), strict=True)),
        moments=Moments(first=group("first"), second=group("second"), step=record["step"]),
        window=group("window") if record["window"] else None,
        recent=tuple(tuple(sequence) for sequence in record["recent"]),
    )
