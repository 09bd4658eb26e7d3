"""Arrays as they travel: dtype, shape and little-endian row-major bytes.

The core never computes with them; it checks lengths, ranges and finiteness, and passes the bytes on. Two dtypes
cover every dialect: ``float32`` for weights, advantages and log-probabilities, ``int64`` for token ids.
"""

import math
import sys
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gateway.core.errors import Invalid


class DType(StrEnum):
    """Element types on the wire."""

    FLOAT32 = "float32"
    INT64 = "int64"

    @property
    def code(self) -> str:
        """The ``array`` module's type code."""
        return "f" if self is DType.FLOAT32 else "q"

    @property
    def size_bytes(self) -> int:
        return 4 if self is DType.FLOAT32 else 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorData:
    """A dense array: ``data`` holds ``prod(shape)`` elements, row-major, little-endian.

    ``data`` may be a view of a record that is not in memory as a whole.
    """

    dtype: DType
    shape: tuple[int, ...]
    data: bytes | memoryview = field(repr=False)

    def __post_init__(self) -> None:
        want = math.prod(self.shape) * self.dtype.size_bytes
        if any(extent < 0 for extent in self.shape) or len(self.data) != want:
            raise Invalid(
                f"shape {list(self.shape)} of {self.dtype} needs {want} bytes, got {len(self.data)}",
                code="shape_mismatch",
            )

    @classmethod
    def of(
        cls, values: Iterable[float] | Iterable[int], dtype: DType, shape: tuple[int, ...] | None = None
    ) -> "TensorData":
        """Pack Python numbers; ``shape`` defaults to one dimension.

        Raises:
            Invalid: a value does not fit the dtype, or the count does not fit ``shape``.
        """
        try:
            packed = array(dtype.code, values)
        except (OverflowError, TypeError) as error:
            raise Invalid(f"value does not fit {dtype}: {error}", code="bad_value") from None
        count = len(packed)
        if sys.byteorder == "big":
            packed.byteswap()
        return cls(dtype=dtype, shape=(count,) if shape is None else shape, data=packed.tobytes())

    @classmethod
    def ints(cls, values: Iterable[int], shape: tuple[int, ...] | None = None) -> "TensorData":
        return cls.of(values, DType.INT64, shape)

    @classmethod
    def floats(cls, values: Iterable[float], shape: tuple[int, ...] | None = None) -> "TensorData":
        return cls.of(values, DType.FLOAT32, shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return len(self.data) // self.dtype.size_bytes

    def values(self) -> "array[float] | array[int]":
        """Return the elements, flattened, as a native array."""
        unpacked: array[float] | array[int] = array(self.dtype.code)
        unpacked.frombytes(self.data)
        if sys.byteorder == "big":
            unpacked.byteswap()
        return unpacked

    def first_non_finite(self) -> int | None:
        """Return the flat index of the first NaN or infinity, or None."""
        if self.dtype is DType.INT64:
            return None
        values = self.values()
        if math.isfinite(sum(values)):  # float32 terms cannot overflow a double sum
            return None
        return next(index for index, value in enumerate(values) if not math.isfinite(value))

    def first_outside(self, low: int, high: int) -> int | None:
        """Return the flat index of the first element outside ``[low, high)``, or None."""
        values = self.values()
        if not values or (min(values) >= low and max(values) < high):
            return None
        return next(index for index, value in enumerate(values) if not low <= value < high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One training sequence.

    ``model_input`` is int64 ``[N]``. Position t predicts ``loss_fn_inputs["target_tokens"][t]``: the client shifts.
    """

    model_input: TensorData
    loss_fn_inputs: Mapping[str, TensorData]

    @property
    def length(self) -> int:
        return self.model_input.size
