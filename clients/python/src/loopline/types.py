"""What goes in: tokens, tensors, datums and parameters. Every model is frozen and refuses unknown fields.

Position t of a datum predicts ``target_tokens[t]``: the caller shifts. All per-position inputs have the length of
``model_input``. Log-probabilities are in nats.
"""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, SupportsIndex, TypeVar, cast, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    import numpy as np
    import torch

DType = Literal["float32", "int64"]
LossFn = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]

INT_INPUTS = frozenset({"target_tokens", "sampler_version"})  # every other loss input is float32

P = TypeVar("P", bound=BaseModel)


@runtime_checkable
class TensorLike(Protocol):
    """What numpy arrays and torch tensors have in common."""

    @property
    def dtype(self) -> Any: ...
    @property
    def shape(self) -> Any: ...
    def tolist(self) -> Any: ...


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class TensorData(_Frozen):
    """A dense array: ``data`` is flat and row-major, ``shape`` says how to fold it.

    ``TensorData(data)`` takes nested lists, a numpy array or a torch tensor; ``dtype`` is then inferred (bools and ints
    become int64, floats float32) unless given, and ``shape`` likewise.
    """

    data: list[int] | list[float]
    dtype: DType
    shape: list[int]

    def __init__(
        self, data: Any, dtype: DType | None = None, shape: Sequence[int] | None = None, **unknown: Any
    ) -> None:
        values, inferred_dtype, inferred_shape = _flatten(data)
        dtype = dtype or inferred_dtype
        folded = list(shape) if shape is not None else inferred_shape
        if math.prod(folded) != len(values):
            raise ValueError(f"shape {folded} does not hold {len(values)} elements")
        super(_Frozen, self).__init__(data=_cast(values, dtype), dtype=dtype, shape=folded, **unknown)

    @property
    def size(self) -> int:
        """Number of elements."""
        return len(self.data)

    def tolist(self) -> Any:
        """Return nested lists of ``shape``; a plain list when it is one-dimensional."""
        nested: list[Any] = list(self.data)
        for extent in reversed(self.shape[1:]):
            nested = [nested[at : at + extent] for at in range(0, len(nested), extent)] if extent else []
        return nested if self.shape else nested[0]

    def to_numpy(self) -> "np.ndarray[Any, Any]":
        """Return a new numpy array. Needs numpy."""
        import numpy as np

        return np.asarray(self.data, dtype=self.dtype).reshape(self.shape)

    def to_torch(self) -> "torch.Tensor":
        """Return a new torch tensor on the CPU. Needs torch (``pip install 'loopline[torch]'``)."""
        import torch

        kind = torch.int64 if self.dtype == "int64" else torch.float32
        return torch.tensor(self.data, dtype=kind).reshape(self.shape)


def _flatten(data: Any) -> tuple[list[Any], DType, list[int]]:
    """Return the elements in row-major order, the natural dtype, and the shape."""
    if isinstance(data, TensorData):
        return list(data.data), data.dtype, list(data.shape)
    if isinstance(data, TensorLike):
        name = str(data.dtype)
        if "complex" in name or "object" in name or "str" in name.lower():
            raise ValueError(f"a tensor of {name} cannot be sent; use float32 or int64")
        shape = [int(extent) for extent in data.shape]
        values = data.tolist()
        for _ in shape[1:]:
            values = list(chain.from_iterable(values))
        dtype: DType = "float32" if "float" in name else "int64"
        return (list(values) if shape else [values]), dtype, shape
    if isinstance(data, str | bytes) or not isinstance(data, Iterable):
        raise ValueError(f"tensor data must be a list or an array, not {type(data).__name__}")
    values = list(cast("Iterable[Any]", data))
    shape = [len(values)]
    while values and isinstance(values[0], list | tuple):
        rows = cast("list[Sequence[Any]]", values)
        width = len(rows[0])
        if any(not isinstance(row, list | tuple) or len(row) != width for row in rows):
            raise ValueError("tensor data is ragged: rows differ in length")
        shape.append(width)
        values = [value for row in rows for value in row]
    integral = all(isinstance(value, int) for value in values)
    return values, ("int64" if integral and values else "float32"), shape


def _cast(values: Sequence[Any], dtype: DType) -> list[int] | list[float]:
    """Return plain Python numbers of ``dtype``.

    Raises:
        ValueError: a value is not a number, not finite, or (int64) not whole.
    """
    try:
        if dtype == "int64":
            return [_whole(value) for value in values]
        floats = [float(value) for value in values]
    except TypeError as error:
        raise ValueError(f"not a {dtype} value: {error}") from None
    if not math.isfinite(math.fsum(floats) if floats else 0.0):
        position = next((at for at, value in enumerate(floats) if not math.isfinite(value)), None)
        if position is not None:
            raise ValueError(f"element {position} is {floats[position]}; only finite numbers can be sent")
    return floats


def _whole(value: Any) -> int:
    return (
        int(value) if isinstance(value, float) and value.is_integer() else operator.index(cast("SupportsIndex", value))
    )


class EncodedTextChunk(_Frozen):
    """A run of token ids."""

    tokens: list[int]

    @property
    def length(self) -> int:
        return len(self.tokens)


class ModelInput(_Frozen):
    """The tokens of one sequence, in chunks. Immutable: ``append`` returns a new one."""

    chunks: list[EncodedTextChunk] = Field(default_factory=list[EncodedTextChunk])

    @classmethod
    def from_ints(cls, tokens: Iterable[int]) -> Self:
        return cls(chunks=[EncodedTextChunk(tokens=[operator.index(token) for token in tokens])])

    @classmethod
    def empty(cls) -> Self:
        return cls(chunks=[])

    def append(self, chunk: EncodedTextChunk) -> Self:
        """Return this input followed by ``chunk``."""
        return type(self)(chunks=[*self.chunks, chunk])

    def append_int(self, token: int) -> Self:
        """Return this input followed by one token."""
        return self.append(EncodedTextChunk(tokens=[token]))

    def to_ints(self) -> list[int]:
        """Return all token ids."""
        return [token for chunk in self.chunks for token in chunk.tokens]

    @property
    def length(self) -> int:
        """Number of tokens."""
        return sum(chunk.length for chunk in self.chunks)


class Datum(_Frozen):
    """One training sequence: ``model_input`` (N tokens) and its per-position loss inputs, each of shape ``[N]``.

    ``target_tokens`` and ``weights`` of cross_entropy may be ``[N, K]``, ``temperature`` one number. Plain lists, numpy
    arrays and torch tensors become TensorData with the dtype their name calls for: int64 for ``target_tokens``, float32
    for every other input. A TensorData is sent as it is.
    """

    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData] = Field(default_factory=dict[str, TensorData])

    def __init__(self, model_input: Any, loss_fn_inputs: Mapping[str, Any] | None = None, **unknown: Any) -> None:
        super(_Frozen, self).__init__(
            model_input=to_model_input(model_input),
            loss_fn_inputs={name: to_input(name, value) for name, value in (loss_fn_inputs or {}).items()},
            **unknown,
        )

    def to_wire(self) -> dict[str, Any]:
        """Return the JSON form of the REST contract."""
        return {
            "model_input": self.model_input.to_ints(),
            "loss_fn_inputs": {
                name: {"dtype": tensor.dtype, "shape": tensor.shape, "data": tensor.data}
                for name, tensor in self.loss_fn_inputs.items()
            },
        }


def to_model_input(tokens: Any) -> ModelInput:
    """Return a ModelInput of a ModelInput, a chunk, a list or array of ids, or ``{"chunks": [...]}``.

    Raises:
        TypeError: it is none of these.
    """
    match tokens:
        case ModelInput():
            return tokens
        case EncodedTextChunk():
            return ModelInput(chunks=[tokens])
        case {"chunks": list()}:
            return ModelInput.model_validate(tokens)
        case TensorLike():
            return ModelInput.from_ints(tokens.tolist())
        case list() | tuple():
            return ModelInput.from_ints(cast("Sequence[int]", tokens))
        case _:
            raise TypeError(f"expected token ids or a ModelInput, got {type(tokens).__name__}")


def to_input(name: str, value: Any) -> TensorData:
    """Return the loss input ``name`` as a tensor; see ``Datum``.

    Raises:
        ValueError: ``value`` does not fit; the message names the input.
    """
    if isinstance(value, TensorData):
        return value
    dtype: DType = "int64" if name in INT_INPUTS else "float32"
    try:
        if isinstance(value, Mapping):
            return TensorData(**cast("Mapping[str, Any]", value))
        return TensorData(value, dtype)
    except ValueError as error:
        raise ValueError(f"loss_fn_inputs.{name}: {error}") from None


class AdamParams(_Frozen):
    """One AdamW step. ``weight_decay`` is decoupled; ``grad_clip_norm`` is a global norm, 0 means no clipping.

    The learning rate of the adapter's B matrices is ``learning_rate * lora_plus_lr_ratio`` (LoRA+).
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    lora_plus_lr_ratio: float = 1.0

    @model_validator(mode="before")
    @classmethod
    def _none_means_default(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            return {name: value for name, value in cast("Mapping[str, Any]", values).items() if value is not None}
        return values


class SamplingParams(_Frozen):
    """How to sample.

    ``max_tokens`` None means what is left of the context; ``temperature`` 0 is greedy; ``top_k`` -1 keeps all tokens.
    ``stop`` is a string, strings, or token ids; what completes a stop is part of the returned tokens, and so is the
    model's end-of-sequence token, which ends a sequence unless ``ignore_eos``. Sample i of a seeded request is drawn
    with ``seed + i``.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    stop_token_ids: list[int] = Field(default_factory=list[int])
    ignore_eos: bool = False

    @model_validator(mode="before")
    @classmethod
    def _none_means_default(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            return {name: value for name, value in cast("Mapping[str, Any]", values).items() if value is not None}
        return values

    def to_wire(self) -> dict[str, Any]:
        """Return the JSON form of the REST contract."""
        wire = self.model_dump(exclude={"stop"}, exclude_none=True)
        match self.stop:
            case None | []:
                pass
            case str():
                wire["stop"] = [self.stop]
            case _ if all(isinstance(stop, int) for stop in self.stop):
                wire["stop_token_ids"] = [*self.stop_token_ids, *self.stop]
            case _:
                wire["stop"] = self.stop
        return wire


def to_params(kind: type[P], params: Any) -> P:
    """Return ``params`` (an instance, a mapping, or None for the defaults) as a ``kind``.

    Raises:
        TypeError: it is none of these.
    """
    if params is None:
        return kind()
    if isinstance(params, kind):
        return params
    if isinstance(params, Mapping):
        return kind.model_validate(params)
    raise TypeError(f"expected {kind.__name__}, a mapping or None, got {type(params).__name__}")
