"""Records: canonical bytes that say what they hold. ``codec`` decides which fields go in.

Layout: ``LPC1``, a little-endian uint32 header length, a JSON header (sorted keys, no spaces), then every tensor's
bytes in header order. Equal values give equal bytes; the bytes are never guessed at: the magic and the type name in
the header say what they hold.
"""

import hashlib
import json
import struct
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from gateway.core.errors import Invalid
from gateway.core.tensors import DType, TensorData

_MAGIC = b"LPC1"


class CorruptRecord(ValueError):
    """Stored bytes are not what this module wrote."""


class Writer:
    """Builds one record: collects tensors beside the JSON that refers to them by order."""

    def __init__(self) -> None:
        self.tensors: list[bytes | memoryview] = []

    def tensor(self, tensor: TensorData) -> list[Any]:
        self.tensors.append(tensor.data)
        return [tensor.dtype.value, list(tensor.shape)]

    def named(self, tensors: Mapping[str, TensorData]) -> list[Any]:
        return [[name, self.tensor(tensors[name])] for name in sorted(tensors)]

    def finish(self, header: Mapping[str, Any]) -> bytes:
        text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
        return b"".join([_MAGIC, struct.pack("<I", len(text)), text, *self.tensors])


@contextmanager
def reading(record: bytes | memoryview) -> Generator["Reader"]:
    """Read one whole record; whatever does not fit makes it a corrupt one."""
    try:
        reader = Reader(record)
        yield reader
        reader.finish()
    except CorruptRecord:
        raise
    except (ValueError, KeyError, TypeError, struct.error, Invalid) as error:
        raise CorruptRecord(f"record cannot be read: {error!r}") from error


class Reader:
    """Hands the tensors back in the order they were written, as views of the record: nothing is copied."""

    def __init__(self, record: bytes | memoryview) -> None:
        if record[:4] != _MAGIC:
            raise CorruptRecord("record does not start with LPC1")
        (length,) = struct.unpack_from("<I", record, 4)
        self.header: dict[str, Any] = json.loads(bytes(record[8 : 8 + length]))
        self._record = memoryview(record)
        self._at = 8 + length

    def finish(self) -> None:
        if self._at != len(self._record):
            raise CorruptRecord(f"record of {len(self._record)} bytes should have {self._at}")

    def tensor(self, described: list[Any]) -> TensorData:
        dtype, shape = DType(described[0]), tuple(described[1])
        size = dtype.size_bytes
        for extent in shape:
            size *= extent
        data = self._record[self._at : self._at + size]
        self._at += size
        return TensorData(dtype=dtype, shape=shape, data=data)

    def named(self, described: list[Any]) -> dict[str, TensorData]:
        return {name: self.tensor(tensor) for name, tensor in described}


def digest(record: bytes) -> str:
    """Return the lower-case hex sha256 of a record."""
    return hashlib.sha256(record).hexdigest()
