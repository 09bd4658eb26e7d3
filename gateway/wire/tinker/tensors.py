"""Arrays between this dialect's two layouts and the core's one."""

from array import array
from collections.abc import Sequence

from gateway.core.errors import Invalid
from gateway.core.tensors import DType, TensorData

MAX_CELLS = 2**24  # of all sparse arrays of a request, spread out


class Cells:
    """How many cells a request's sparse arrays may still be spread out to: a few bytes can name a huge array."""

    def __init__(self) -> None:
        self._left = MAX_CELLS

    def take(self, count: int, field: str) -> None:
        """Raise Invalid when the request asks for more than ``MAX_CELLS`` in all."""
        self._left -= count
        if self._left < 0:
            raise Invalid(
                f"{field}: the sparse arrays of one request may have {MAX_CELLS} cells in all, the empty ones included",
                code="too_many_cells",
                field=field,
                details={"limit": MAX_CELLS},
            )


def from_csr(
    values: bytes,
    rows: Sequence[int],
    columns: Sequence[int],
    *,
    shape: tuple[int, ...],
    dtype: DType,
    field: str,
    cells: Cells,
    empty: int = 0,
) -> TensorData:
    """Return the dense array of a CSR one; cells that it leaves out are ``empty``.

    Args:
        values: the cells' values, bytes of ``dtype``.
        rows: ``shape[0] + 1`` offsets into ``values``, from 0, never falling.
        columns: each value's column.

    Raises:
        Invalid: the parts do not fit each other.
    """
    if len(shape) != 2 or min(shape) < 0:
        raise Invalid(f"{field}.shape of a sparse array must be [rows, columns], got {list(shape)[:8]}", field=field)
    height, width = shape
    if len(values) % dtype.size_bytes or len(values) // dtype.size_bytes != len(columns):
        raise Invalid(f"{field}: a sparse array needs one column index for each value", field=field)
    if len(rows) != height + 1 or rows[0] != 0 or rows[-1] != len(columns):
        raise Invalid(
            f"{field}: row offsets must be {height + 1} numbers from 0 to {len(columns)}, the number of values",
            field=field,
        )
    if (fall := next((row for row in range(height) if rows[row] > rows[row + 1]), None)) is not None:
        raise Invalid(f"{field}: row offsets must not fall; they do after row {fall}", field=field)
    cells.take(height * width, field)
    given = TensorData(dtype=dtype, shape=(len(columns),), data=values).values()
    dense: list[float | int] = [empty] * (height * width)
    for row in range(height):
        for at in range(rows[row], rows[row + 1]):
            if not 0 <= columns[at] < width:
                raise Invalid(f"{field}: column index {columns[at]} is outside 0 to {width - 1}", field=field)
            dense[row * width + columns[at]] = given[at]
    return TensorData.of(dense, dtype, shape)


def int32(raw: bytes, field: str) -> "array[int]":
    """Return packed int32 numbers."""
    return _unpack("i", raw, field)


def int64(raw: bytes, field: str) -> "array[int]":
    """Return packed int64 numbers."""
    return _unpack("q", raw, field)


def _unpack(code: str, raw: bytes, field: str) -> "array[int]":
    numbers: array[int] = array(code)
    if len(raw) % numbers.itemsize:
        raise Invalid(f"{field} must be {numbers.itemsize} bytes a number, got {len(raw)} bytes", field=field)
    numbers.frombytes(raw)
    return numbers
