"""Tables as CSV: money as dollars to the nano, moments as ISO 8601, nothing that a spreadsheet would execute."""

import csv
import io
from collections.abc import Iterable, Sequence
from datetime import datetime

from fastapi import Response

Cell = str | int | datetime | None


class Usd(int):
    """Nano-USD, written as dollars."""


_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_response(header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Response:
    """Return a table with one header line."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([_written(cell) for cell in row] for row in rows)
    return Response(text.getvalue(), media_type="text/csv; charset=utf-8")


def _written(cell: Cell) -> str:
    match cell:
        case None:
            return ""
        case Usd():
            dollars, fraction = divmod(abs(cell), 1_000_000_000)
            return f"{'-' if cell < 0 else ''}{dollars}.{fraction:09d}"
        case int():
            return str(cell)
        case datetime():
            return f"{cell:%Y-%m-%dT%H:%M:%SZ}"
        case str():
            return f"'{cell}" if cell.startswith(_FORMULA) else cell
