"""What a disk that takes no more is to the caller."""

import errno

from gateway.core.errors import Unavailable

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def disk_full() -> Unavailable:
    return Unavailable("there is no room left on the server's disk; nothing was recorded", code="disk_full")


def write_failed(error: OSError) -> Unavailable:
    """Return what a failed write of content is to the caller: nothing was acknowledged, and it may work later."""
    if error.errno in _FULL:
        return disk_full()
    return Unavailable("the server's disk could not be written; nothing was recorded", code="storage_error")
