"""The children's log files: appended to, turned over when large, and quoted when something went wrong."""

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

_LIMIT_BYTES = 64 * 1024 * 1024
_TAIL_BYTES = 64 * 1024


def open_log(path: Path) -> BinaryIO:
    """Open a log for appending. One that has grown past 64 MiB is first renamed to ``NAME.1``, replacing the last."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.exists() and path.stat().st_size > _LIMIT_BYTES:
        path.replace(path.with_name(f"{path.name}.1"))
    return path.open("ab")


def tail(path: Path, lines: int = 15) -> Sequence[str]:
    """Return the last ``lines`` lines that are not empty; none when there is no such file."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, 2)
            log.seek(max(0, size - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip()][-lines:]
