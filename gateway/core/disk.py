"""What a disk that takes no more, or gives no more, is to the caller."""

import errno

from gateway.core.errors import Unavailable

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP})


def disk_full() -> Unavailable:
    return Unavailable("there is no room left on the server's disk; nothing was recorded", code="disk_full")


def write_failed(error: OSError) -> Unavailable:
    """Return what a failed write of content is to the caller: nothing was acknowledged, and it may work later."""
    if error.errno in _FULL:
        return disk_full()
    return Unavailable("the server's disk could not be written; nothing was recorded", code="storage_error")


def is_missing(error: OSError) -> bool:
    """Whether the file is not there. Any other error of reading says nothing about what is."""
    return error.errno in _MISSING


def read_failed(error: OSError) -> Unavailable:
    """Return what a failed read of a file that is there is to the caller: it may work later."""
    return Unavailable(f"the server's disk could not be read ({error.strerror})", code="disk_unreadable")
