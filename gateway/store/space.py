"""Room on disk: new work is refused while there is still some left for what was already acknowledged.

Results and ledger of accepted work are written into the reserve; so a full disk stops submissions, saves and snapshots,
not the work in the log, and everything goes on by itself once there is room again.
"""

import os
from pathlib import Path

from gateway.core.disk import disk_full

RESERVE_BYTES = 256 * 1024 * 1024
RESERVE_SHARE = 0.05  # of the file system, where that is less


def require_space(directory: Path, size_bytes: int = 0) -> None:
    """Return when ``size_bytes`` more leave the reserve of the file system of ``directory`` untouched.

    Raises:
        Unavailable: ``disk_full``; the same request may work later.
    """
    if short_of_space(directory, size_bytes):
        raise disk_full()


def short_of_space(directory: Path, size_bytes: int = 0) -> bool:
    """Say whether writing ``size_bytes`` would use the reserve. A directory that does not exist yet is its parent's."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    found = os.statvfs(directory)
    reserve = min(RESERVE_BYTES, RESERVE_SHARE * found.f_blocks * found.f_frsize)
    return found.f_bavail * found.f_frsize < reserve + size_bytes
