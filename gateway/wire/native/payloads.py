"""Training batches from JSON to core payloads.

A batch can hold millions of numbers, so arrays go straight from parsed JSON into packed bytes; no schema object is
made per number. Errors still name the exact place: ``data[3].loss_fn_inputs.weights[17]``.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from gateway.core.errors import Invalid
from gateway.core.payloads import Forward, ForwardBackward, LossFn
from gateway.core.tensors import Datum, DType, TensorData

INT_INPUTS = frozenset({"target_tokens", "sampler_version"})
_MAX_DIMENSIONS = 8
Batch = TypeVar("Batch", Forward, ForwardBackward)


def parse_batch(body: Any, kind: type[Batch]) -> tuple[Batch, int | None]:
    """Return the payload and its ``seq`` from a forward or forward_backward body.

    Raises:
        Invalid: names the field, and the datum by index in ``details``.
    """
    fields = _object(body, "", known=("seq", "data", "loss_fn", "loss_fn_config"), required=("data",))
    seq = fields.get("seq")
    if seq is not None and (not isinstance(seq, int) or isinstance(seq, bool)):
        raise Invalid("seq must be a whole number", field="seq")
    data = tuple(_datum(index, entry) for index, entry in enumerate(_list(fields["data"], "data")))
    payload = kind(
        data=data,
        loss_fn=_loss_fn(fields.get("loss_fn", LossFn.CROSS_ENTROPY.value)),
        loss_fn_config=_config(fields.get("loss_fn_config")),
    )
    return payload, seq


def _loss_fn(name: Any) -> LossFn:
    known = [loss.value for loss in LossFn]
    if name not in known:
        shown = repr(name[:80]) if isinstance(name, str) else "a value that is not text"
        raise Invalid(f"no loss function {shown}; known: {', '.join(known)}", code="unknown_loss_fn", field="loss_fn")
    return LossFn(name)


def _config(value: Any) -> Mapping[str, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Invalid("loss_fn_config must be an object", field="loss_fn_config")
    entries = cast("dict[str, Any]", value)
    for name, number in entries.items():
        if type(number) not in (int, float):
            raise Invalid(f"loss_fn_config.{name[:80]} must be a number", field=f"loss_fn_config.{name[:80]}")
    return {name: float(number) for name, number in entries.items()}


def _datum(index: int, entry: Any) -> Datum:
    where = f"data[{index}]"
    try:
        fields = _object(
            entry, where, known=("model_input", "loss_fn_inputs"), required=("model_input", "loss_fn_inputs")
        )
        inputs = fields["loss_fn_inputs"]
        if not isinstance(inputs, dict):
            raise Invalid(f"{where}.loss_fn_inputs must be an object", field=f"{where}.loss_fn_inputs")
        named = cast("dict[str, Any]", inputs)
        return Datum(
            model_input=_model_input(fields["model_input"], f"{where}.model_input"),
            loss_fn_inputs={
                name: _tensor(value, f"{where}.loss_fn_inputs.{name[:80]}", _dtype_of(name))
                for name, value in named.items()
            },
        )
    except Invalid as error:
        error.details.setdefault("datum", index)
        raise


def _model_input(value: Any, where: str) -> TensorData:
    if isinstance(value, list):
        return _numbers(cast("list[Any]", value), where, DType.INT64)
    fields = _object(value, where, known=("chunks",), required=("chunks",))
    tokens: list[Any] = []
    for index, chunk in enumerate(_list(fields["chunks"], f"{where}.chunks")):
        at = f"{where}.chunks[{index}]"
        chunk_tokens = _list(_object(chunk, at, known=("tokens",), required=("tokens",))["tokens"], f"{at}.tokens")
        _check_types(chunk_tokens, f"{at}.tokens", DType.INT64)
        tokens += chunk_tokens
    return _numbers(tokens, where, DType.INT64)


def _dtype_of(name: str) -> DType:
    return DType.INT64 if name in INT_INPUTS else DType.FLOAT32


def _tensor(value: Any, where: str, dtype: DType) -> TensorData:
    if isinstance(value, list):
        return _numbers(cast("list[Any]", value), where, dtype)
    fields = _object(value, where, known=("dtype", "shape", "data"), required=("dtype", "shape", "data"))
    if fields["dtype"] not in [known.value for known in DType]:
        raise Invalid(f"{where}.dtype must be one of {', '.join(DType)}", field=f"{where}.dtype")
    shape = _list(fields["shape"], f"{where}.shape")
    if len(shape) > _MAX_DIMENSIONS or any(type(extent) is not int or extent < 0 for extent in shape):
        raise Invalid(
            f"{where}.shape must be at most {_MAX_DIMENSIONS} whole numbers of at least 0", field=f"{where}.shape"
        )
    flat = _numbers(_list(fields["data"], f"{where}.data"), f"{where}.data", DType(fields["dtype"]))
    try:
        return TensorData(dtype=flat.dtype, shape=tuple(shape), data=flat.data)
    except Invalid:
        raise Invalid(
            f"{where}.data has {flat.size} numbers, its shape {shape} needs another count",
            code="shape_mismatch",
            field=f"{where}.data",
            details={"got": flat.size},
        ) from None


def _numbers(values: Sequence[Any], where: str, dtype: DType) -> TensorData:
    _check_types(values, where, dtype)
    try:
        return TensorData.of(values, dtype)
    except Invalid:
        position = next(index for index, value in enumerate(values) if not _fits(value, dtype))
        raise Invalid(
            f"{where}[{position}] does not fit {dtype}",
            code="bad_value",
            field=f"{where}[{position}]",
            details={"position": position},
        ) from None


def _check_types(values: Sequence[Any], where: str, dtype: DType) -> None:
    """Check every element's type at the speed of C: JSON true, null and text are no numbers."""
    allowed = {int} if dtype is DType.INT64 else {int, float}
    if set(map(type, values)) - allowed:
        position = next(index for index, value in enumerate(values) if type(value) not in allowed)
        wanted = "a whole number" if dtype is DType.INT64 else "a number"
        raise Invalid(
            f"{where}[{position}] must be {wanted}",
            field=f"{where}[{position}]",
            details={"position": position},
        )


def _fits(value: Any, dtype: DType) -> bool:
    try:
        array(dtype.code, [value])
    except (OverflowError, TypeError):
        return False
    return True


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise Invalid(f"{where} must be a list", field=where)
    return cast("list[Any]", value)


def _object(value: Any, where: str, *, known: Sequence[str], required: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise Invalid(f"{where or 'the body'} must be an object", field=where or None)
    fields = cast("dict[str, Any]", value)
    for name in fields:
        if name not in known:
            path = f"{where}.{name[:80]}" if where else name[:80]
            raise Invalid(f"unknown field {path}", field=path)
    for name in required:
        if name not in fields:
            path = f"{where}.{name}" if where else name
            raise Invalid(f"{path} is missing", field=path)
    return fields
