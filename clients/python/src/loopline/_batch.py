"""Batches: the forms callers may write, cutting them into requests, and putting the answers together again."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from loopline._transport import encode
from loopline.errors import ApiError, Details, OperationError, ResultMismatchError
from loopline.results import ForwardBackwardOutput
from loopline.types import Datum, EncodedTextChunk, ModelInput, TensorLike, to_model_input

MAX_DATUMS = 1024  # per request; the gateway's own limit
MAX_BYTES = 4_000_000  # of JSON per request; a single larger datum goes alone

Tokenize = Callable[[str], list[int]]

_DATUM = re.compile(r"\bdata\[(\d+)\]")


def to_datums(batch: Any, loss_fn_inputs: Any, tokenize: Tokenize) -> list[Datum]:
    """Return ``batch`` as datums.

    A batch is a list of Datum, token lists or arrays, strings (tokenized), ModelInput, chunks, or mappings with
    ``model_input`` or ``prompt`` and ``loss_fn_inputs``; or one bare token list, which is one datum. ``loss_fn_inputs``
    fills the datums that carry none: one mapping for all, or a list with one mapping each.

    Raises:
        TypeError, ValueError: the message names the datum.
    """
    items = _items(batch)
    if isinstance(loss_fn_inputs, Mapping) or loss_fn_inputs is None:
        fills: list[Any] = [loss_fn_inputs] * len(items)
    else:
        fills = list(cast("Iterable[Any]", loss_fn_inputs))
        if len(fills) != len(items):
            raise ValueError(f"loss_fn_inputs has {len(fills)} entries for {len(items)} datums")
    datums: list[Datum] = []
    for index, (item, fill) in enumerate(zip(items, fills, strict=True)):
        try:
            datums.append(_to_datum(item, fill, tokenize))
        except (TypeError, ValueError) as error:
            raise type(error)(f"data[{index}]: {error}") from error
    return datums


def _items(batch: Any) -> list[Any]:
    if isinstance(batch, TensorLike):
        batch = batch.tolist()
    if isinstance(batch, Datum | ModelInput | EncodedTextChunk | str | Mapping):
        return [batch]
    if not isinstance(batch, Iterable):
        raise TypeError(f"a batch is a list of datums, not {type(batch).__name__}")
    items = list(cast("Iterable[Any]", batch))
    if not items:
        raise ValueError("the batch is empty: it must hold at least one datum")
    return [items] if all(isinstance(item, int) for item in items) else items


def _to_datum(item: Any, fill: Any, tokenize: Tokenize) -> Datum:
    if isinstance(item, Datum):
        if item.loss_fn_inputs or not fill:
            return item
        return Datum(item.model_input, fill)
    if isinstance(item, Mapping) and "chunks" not in item:
        fields = dict(cast("Mapping[str, Any]", item))
        inputs = fields.pop("loss_fn_inputs", None) or fill
        given = [name for name in ("model_input", "prompt") if name in fields]
        if len(given) != 1 or len(fields) != 1:
            raise ValueError(
                f"a datum has model_input (or prompt) and loss_fn_inputs, got {sorted(cast('Mapping[str, Any]', item))}"
            )
        return Datum(to_tokens(fields[given[0]], tokenize), inputs)
    return Datum(to_tokens(item, tokenize), fill)


def to_tokens(prompt: Any, tokenize: Tokenize) -> ModelInput:
    """Return any prompt form as a ModelInput: what ``to_model_input`` takes, or a string."""
    return to_model_input(tokenize(prompt) if isinstance(prompt, str) else prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One request's share of a batch: its body without seq, and the batch index of its first datum."""

    body: bytes
    first: int
    size: int


def cut(datums: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None) -> list[Chunk]:
    """Return the batch as request bodies, in order, each within MAX_DATUMS and (more than one datum) MAX_BYTES."""
    tail = b"],%s}" % encode({"loss_fn": loss_fn, "loss_fn_config": dict(loss_fn_config or {})})[1:-1]
    chunks: list[Chunk] = []
    parts: list[bytes] = []
    size = first = 0
    for index, datum in enumerate(datums):
        part = encode(datum.to_wire())
        if parts and (len(parts) == MAX_DATUMS or size + len(part) > MAX_BYTES):
            chunks.append(Chunk(body=b'{"data":[' + b",".join(parts) + tail, first=first, size=len(parts)))
            parts, size, first = [], 0, index
        parts.append(part)
        size += len(part) + 1
    chunks.append(Chunk(body=b'{"data":[' + b",".join(parts) + tail, first=first, size=len(parts)))
    return chunks


def join(outputs: Sequence[ForwardBackwardOutput], sizes: Sequence[int]) -> ForwardBackwardOutput:
    """Return the answers to a cut batch as the answer to the whole.

    Metrics merge by the reduction their name ends in: ``:sum``, ``:mean`` (weighted by datums), ``:min``, ``:max``.

    Raises:
        ResultMismatchError: a chunk answered for another number of datums; a metric has no known reduction.
    """
    for output, size in zip(outputs, sizes, strict=True):
        if len(output.loss_fn_outputs) != size:
            raise ResultMismatchError(f"sent {size} datums, got {len(output.loss_fn_outputs)} outputs")
    if len(outputs) == 1:
        return outputs[0]
    usage: dict[str, int] = {}
    for output in outputs:
        for meter, quantity in output.usage.items():
            usage[meter] = usage.get(meter, 0) + quantity
    names = dict.fromkeys(name for output in outputs for name in output.metrics)
    return ForwardBackwardOutput(
        loss_fn_outputs=[datum for output in outputs for datum in output.loss_fn_outputs],
        metrics={name: _merge(name, outputs, sizes) for name in names},
        usage=usage,
        cost_nanos=sum(output.cost_nanos for output in outputs),
    )


def _merge(name: str, outputs: Sequence[ForwardBackwardOutput], sizes: Sequence[int]) -> float:
    found = [
        (output.metrics[name], size) for output, size in zip(outputs, sizes, strict=True) if name in output.metrics
    ]
    values = [value for value, _ in found]
    match name.rpartition(":")[2]:
        case "sum":
            return sum(values)
        case "mean":
            return sum(value * size for value, size in found) / sum(size for _, size in found)
        case "min":
            return min(values)
        case "max":
            return max(values)
        case reduction:
            raise ResultMismatchError(f"metric {name!r}: {reduction!r} is no reduction this client can merge chunks by")


def shifted(error: ApiError | OperationError, first: int) -> ApiError | OperationError:
    """Return ``error`` with the datum indices of a chunk turned into those of the batch the caller wrote."""
    if first == 0:
        return error
    state = error._state()  # pyright: ignore[reportPrivateUsage]

    def move(text: str) -> str:
        return _DATUM.sub(lambda found: f"data[{int(found[1]) + first}]", text)

    details: dict[str, Any] = dict(cast("Details", state["details"]))
    if isinstance(details.get("datum"), int):
        details["datum"] += first
    state.update(
        message=move(error.message),
        field=None if error.field is None else move(error.field),
        details=details,
    )
    return type(error)(**json.loads(json.dumps(state)))
