"""Datums and tensors between this dialect's JSON and the core's arrays."""

from collections.abc import Mapping, Sequence
from typing import cast

from gateway.core.errors import Invalid
from gateway.core.tensors import Datum, DType, TensorData
from gateway.wire.sagemaker.models import Document

INPUTS = ("target_tokens", "weights", "advantages", "logprobs", "ref_log_prob", "temperature")
_DTYPES = {
    "int64": DType.INT64,
    "int32": DType.INT64,
    "float32": DType.FLOAT32,
    "float16": DType.FLOAT32,
    "bfloat16": DType.FLOAT32,
}


def datums_of(documents: Sequence[Document], *, needed: Sequence[str], field: str) -> tuple[Datum, ...]:
    """Return a batch. What its arrays hold and how long they are is the core's to check.

    Raises:
        Invalid: names the datum and the input.
    """
    return tuple(_datum(document, needed, f"{field}[{index}]") for index, document in enumerate(documents))


def tokens_of(model_input: Document, field: str) -> list[int]:
    """Return the token ids of all chunks."""
    chunks: Sequence[Document] = model_input["chunks"]
    if not chunks:
        raise Invalid(f"{field}.chunks must have at least one chunk", field=f"{field}.chunks")
    return [token for chunk in chunks for token in chunk["tokens"]]


def _datum(document: Document, needed: Sequence[str], field: str) -> Datum:
    given: Mapping[str, Document] = document.get("lossFnInputs", {})
    where = f"{field}.lossFnInputs"
    for name in given:
        if name not in INPUTS:
            raise Invalid(
                f"{where} has no key {name[:80]!r}; known: {', '.join(INPUTS)}",
                code="unknown_loss_input",
                field=f"{where}.{name[:80]}",
            )
    for name in needed:
        if name not in given:
            raise Invalid(f"{where} needs {name}", code="missing_loss_input", field=f"{where}.{name}")
    return Datum(
        model_input=TensorData.ints(tokens_of(document["modelInput"], f"{field}.modelInput")),
        loss_fn_inputs={name: _tensor(tensor, f"{where}.{name}") for name, tensor in given.items()},
    )


def _tensor(tensor: Document, field: str) -> TensorData:
    dtype = _DTYPES.get(tensor["dtype"])
    if dtype is None:
        raise Invalid(
            f"{field}.dtype must be one of {', '.join(_DTYPES)}, got {tensor['dtype'][:80]!r}", field=f"{field}.dtype"
        )
    data, shape = tensor["data"], tensor.get("shape")
    if not isinstance(data, list):
        raise Invalid(f"{field}.data must be a flat list of numbers", field=f"{field}.data")
    try:
        return TensorData.of(cast("list[float]", data), dtype, None if shape is None else tuple(shape))
    except Invalid as error:
        raise Invalid(f"{field}: {error.message}", code=error.code, field=field) from None


def tensor_document(tensor: TensorData) -> Document:
    """Return an array of a result."""
    return {"data": tensor.values().tolist(), "dtype": tensor.dtype.value, "shape": list(tensor.shape)}
