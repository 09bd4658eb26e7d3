"""Canonical bytes of payloads and results: what the log stores, and what a digest is taken of.

Layout: ``LPC1``, a little-endian uint32 header length, a JSON header (sorted keys, no spaces), then every tensor's
bytes in header order. Equal values give equal bytes; the bytes are never guessed at: the magic and the type name in
the header say what they hold.
"""

import hashlib
import json
import struct
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, assert_never

from gateway.core.errors import Invalid, Kind
from gateway.core.ids import VersionId
from gateway.core.payloads import (
    Forward,
    ForwardBackward,
    LoadState,
    LossFn,
    OptimStep,
    Payload,
    Publish,
    SaveState,
    SaveWeights,
    kind_of,
)
from gateway.core.results import Failure, ForwardResult, LoadStateResult, OptimStepResult, Outcome, SaveResult
from gateway.core.tensors import Datum, DType, TensorData

_MAGIC = b"LPC1"


class CorruptRecord(ValueError):
    """Stored bytes are not what this module wrote."""


class _Writer:
    """Collects tensors beside the JSON that refers to them by order."""

    def __init__(self) -> None:
        self.tensors: list[bytes] = []

    def tensor(self, tensor: TensorData) -> list[Any]:
        self.tensors.append(tensor.data)
        return [tensor.dtype.value, list(tensor.shape)]

    def named(self, tensors: Mapping[str, TensorData]) -> list[Any]:
        return [[name, self.tensor(tensors[name])] for name in sorted(tensors)]

    def finish(self, header: Mapping[str, Any]) -> bytes:
        text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
        return b"".join([_MAGIC, struct.pack("<I", len(text)), text, *self.tensors])


@contextmanager
def _reading(record: bytes) -> Generator["_Reader"]:
    """Read one whole record; whatever does not fit makes it a corrupt one."""
    try:
        reader = _Reader(record)
        yield reader
        reader.finish()
    except CorruptRecord:
        raise
    except (ValueError, KeyError, TypeError, struct.error, Invalid) as error:
        raise CorruptRecord(f"record cannot be read: {error!r}") from error


class _Reader:
    """Hands the tensors back in the order they were written."""

    def __init__(self, record: bytes) -> None:
        if record[:4] != _MAGIC:
            raise CorruptRecord("record does not start with LPC1")
        (length,) = struct.unpack_from("<I", record, 4)
        self.header: dict[str, Any] = json.loads(record[8 : 8 + length])
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
        data = bytes(self._record[self._at : self._at + size])
        self._at += size
        return TensorData(dtype=dtype, shape=shape, data=data)

    def named(self, described: list[Any]) -> dict[str, TensorData]:
        return {name: self.tensor(tensor) for name, tensor in described}


def digest(record: bytes) -> str:
    """Return the lower-case hex sha256 of a record."""
    return hashlib.sha256(record).hexdigest()


def encode_payload(payload: Payload) -> bytes:
    writer = _Writer()
    header: dict[str, Any] = {"kind": kind_of(payload).value}
    match payload:
        case Forward() | ForwardBackward():
            header["loss_fn"] = payload.loss_fn.value
            header["config"] = {name: _canonical(value) for name, value in payload.loss_fn_config.items()}
            header["data"] = [
                [writer.tensor(datum.model_input), writer.named(datum.loss_fn_inputs)] for datum in payload.data
            ]
        case OptimStep():
            for name in _ADAM_FIELDS:
                header[name] = _canonical(getattr(payload, name))
            if payload.lora_plus_lr_ratio != 1.0:  # left out at its default: records from before it have equal digests
                header["lora_plus_lr_ratio"] = _canonical(payload.lora_plus_lr_ratio)
        case SaveWeights():
            header.update(
                group=payload.group,
                merge=payload.merge,
                publish=payload.publish.value,
                description=payload.description,
            )
        case SaveState():
            header.update(group=payload.group, description=payload.description)
        case LoadState():
            header.update(version_id=payload.version_id, optimizer=payload.optimizer)
        case _:
            assert_never(payload)
    return writer.finish(header)


def _canonical(value: float) -> float:
    """Return ``value`` so that equal numbers have equal text: 1 as 1.0, and -0.0 as 0.0."""
    return float(value) + 0.0


_ADAM_FIELDS = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")


def decode_payload(record: bytes) -> Payload:
    """Read what ``encode_payload`` wrote.

    Raises:
        CorruptRecord: the bytes are something else.
    """
    with _reading(record) as reader:
        return _payload(reader)


def _payload(reader: _Reader) -> Payload:
    header = reader.header
    match header.get("kind"):
        case "forward":
            return Forward(**_forward_fields(reader))
        case "forward_backward":
            return ForwardBackward(**_forward_fields(reader))
        case "optim_step":
            ratio = header.get("lora_plus_lr_ratio", 1.0)
            return OptimStep(**{name: header[name] for name in _ADAM_FIELDS}, lora_plus_lr_ratio=ratio)
        case "save_weights":
            return SaveWeights(
                group=header["group"],
                merge=header["merge"],
                publish=Publish(header["publish"]),
                description=header["description"],
            )
        case "save_state":
            return SaveState(group=header["group"], description=header["description"])
        case "load_state":
            return LoadState(version_id=VersionId(header["version_id"]), optimizer=header["optimizer"])
        case other:
            raise CorruptRecord(f"unknown payload kind {other!r}")


def _forward_fields(reader: _Reader) -> dict[str, Any]:
    header = reader.header
    data = tuple(
        Datum(model_input=reader.tensor(tokens), loss_fn_inputs=reader.named(inputs))
        for tokens, inputs in header["data"]
    )
    return {"data": data, "loss_fn": LossFn(header["loss_fn"]), "loss_fn_config": header["config"]}


def encode_outcome(outcome: Outcome) -> bytes:
    writer = _Writer()
    match outcome:
        case ForwardResult():
            header: dict[str, Any] = {
                "type": "forward",
                "outputs": [writer.named(output) for output in outcome.outputs],
                "metrics": dict(outcome.metrics),
            }
        case OptimStepResult():
            header = {"type": "optim_step", "step": outcome.optimizer_step, "metrics": dict(outcome.metrics)}
        case SaveResult():
            header = {
                "type": "save",
                "version_id": outcome.version_id,
                "group": outcome.group,
                "number": outcome.number,
            }
        case LoadStateResult():
            header = {
                "type": "load_state",
                "version_id": outcome.version_id,
                "step": outcome.optimizer_step,
                "discarded": outcome.discarded_gradient,
            }
        case Failure():
            header = {
                "type": "failure",
                "kind": outcome.kind.value,
                "code": outcome.code,
                "message": outcome.message,
                "field": outcome.field,
                "details": dict(outcome.details),
            }
        case _:
            assert_never(outcome)
    return writer.finish(header)


def decode_outcome(record: bytes) -> Outcome:
    """Read what ``encode_outcome`` wrote.

    Raises:
        CorruptRecord: the bytes are something else.
    """
    with _reading(record) as reader:
        return _outcome(reader)


def _outcome(reader: _Reader) -> Outcome:
    header = reader.header
    match header.get("type"):
        case "forward":
            return ForwardResult(
                outputs=tuple(reader.named(output) for output in header["outputs"]), metrics=header["metrics"]
            )
        case "optim_step":
            return OptimStepResult(optimizer_step=header["step"], metrics=header["metrics"])
        case "save":
            return SaveResult(
                version_id=VersionId(header["version_id"]), group=header["group"], number=header["number"]
            )
        case "load_state":
            return LoadStateResult(
                version_id=VersionId(header["version_id"]),
                optimizer_step=header["step"],
                discarded_gradient=header["discarded"],
            )
        case "failure":
            return Failure(
                kind=Kind(header["kind"]),
                code=header["code"],
                message=header["message"],
                field=header["field"],
                details=header["details"],
            )
        case other:
            raise CorruptRecord(f"unknown outcome type {other!r}")
