"""Which release of Loopline this is. A leaf: every process may import it."""

import importlib.metadata
from functools import cache

DISTRIBUTION = "loopline-server"


@cache
def code_version() -> str:
    """Return the installed release, ``unknown`` where the code runs without being installed."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
