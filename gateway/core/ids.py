"""Identifiers: a prefix that names the kind, then 26 characters that sort by creation time.

Only ``[a-z0-9-]`` is used, so one id is legal in every dialect, in a URL, as a directory name and as an
engine's adapter name. Ids are opaque: nothing is parsed out of them.
"""

import secrets
import time
from typing import NewType

ProjectId = NewType("ProjectId", str)
KeyId = NewType("KeyId", str)
SessionId = NewType("SessionId", str)
OperationId = NewType("OperationId", str)
VersionId = NewType("VersionId", str)
SampleId = NewType("SampleId", str)
ScoreId = NewType("ScoreId", str)
ClientId = NewType("ClientId", str)

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford base 32: no i, l, o, u


def _base32(value: int, width: int) -> str:
    return "".join(_ALPHABET[(value >> (5 * place)) & 31] for place in reversed(range(width)))


def _unique() -> str:
    """Return 10 characters of milliseconds since 1970 and 16 of randomness (80 bits)."""
    return _base32(time.time_ns() // 1_000_000, 10) + _base32(secrets.randbits(80), 16)


def new_project_id() -> ProjectId:
    return ProjectId(f"proj-{_unique()}")


def new_session_id() -> SessionId:
    return SessionId(f"sess-{_unique()}")


def new_operation_id() -> OperationId:
    return OperationId(f"op-{_unique()}")


def new_version_id() -> VersionId:
    return VersionId(f"ver-{_unique()}")


def new_upload_location() -> str:
    return f"upload-{_unique()}"


def new_sample_id() -> SampleId:
    return SampleId(f"smp-{_unique()}")


def new_score_id() -> ScoreId:
    return ScoreId(f"scr-{_unique()}")


def new_event_id() -> str:
    return f"evt-{_unique()}"


def new_client_id() -> ClientId:
    return ClientId(f"client-{_unique()}")


def new_key_id() -> KeyId:
    """Return a key id: 20 characters without a dash, so that a key splits at a fixed place."""
    return KeyId(_base32(secrets.randbits(100), 20))
