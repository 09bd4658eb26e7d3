"""Databases that are not used: for whoever starts a process, never for its clients."""

import structlog


class UnfitDatabase(Exception):
    """The database cannot be used as it is; the message says what to do."""


class WeakDurability(UnfitDatabase):
    """The database would acknowledge what a power cut can take back; the message says which setting to change."""


def weak(reason: str, *, allowed: bool) -> None:
    """Refuse a database that may forget, or warn where that is ``allowed``. Raises WeakDurability."""
    if not allowed:
        raise WeakDurability(f"{reason}. LOOPLINE_ALLOW_WEAK_DURABILITY=true runs all the same")
    structlog.stdlib.get_logger("gateway.store").warning("weak_durability", reason=reason)
