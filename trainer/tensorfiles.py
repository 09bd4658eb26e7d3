"""safetensors files, typed: whole ones, and tensor by tensor. No pickle anywhere."""

import json
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, uint8

_OS_ERROR = re.compile(r"os error (\d+)")


class UnreadableTensors(ValueError):
    """A file is missing or is not a safetensors file."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write contiguous CPU tensors. Raises OSError when the disk does not take them."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        _raise_os_error(error, path)
        raise


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Raises UnreadableTensors, or OSError when the disk cannot be read."""
    try:
        return load_file(path)
    except (FileNotFoundError, SafetensorError) as error:
        _raise_os_error(error, path)
        raise UnreadableTensors(f"{path.name} cannot be read: {error}") from error


def _raise_os_error(error: Exception, path: Path) -> None:
    """Raise the OSError that safetensors put into words, if it did."""
    if isinstance(error, SafetensorError) and (found := _OS_ERROR.search(str(error))) is not None:
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


@dataclass(frozen=True, slots=True)
class TensorFile:
    """An open file; tensors are read one at a time."""

    _file: Any

    def names(self) -> list[str]:
        return list(self._file.keys())

    def tensor(self, name: str) -> Tensor:
        return self._file.get_tensor(name)

    def describe(self, name: str) -> tuple[list[int], str]:
        """Return shape and safetensors dtype without reading the data."""
        view: Any = self._file.get_slice(name)
        return list(view.get_shape()), str(view.get_dtype())


@contextmanager
def open_tensors(path: Path) -> Iterator[TensorFile]:
    """Open a safetensors file for reading."""
    opened: Any = safe_open(path, framework="pt")
    with opened as file:
        yield TensorFile(file)


def stream_tensors(
    path: Path, described: Mapping[str, tuple[Sequence[int], str]], tensor: Callable[[str], Tensor]
) -> None:
    """Write tensors of known shape and dtype, asking ``tensor`` for one after the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (shape, dtype) in described.items():
        size = _size_bytes(shape, dtype)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)))
        out.write(text)
        for name in described:
            out.write(tensor(name).detach().cpu().contiguous().reshape(-1).view(uint8).numpy().data)


def _size_bytes(shape: Sequence[int], dtype: str) -> int:
    digits = "".join(character for character in dtype.partition("_")[0] if character.isdigit())  # F8_E4M3, BOOL
    count = 1
    for extent in shape:
        count *= extent
    return count * int(digits or 8) // 8
