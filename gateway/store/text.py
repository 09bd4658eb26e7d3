"""Text from outside, on its way into SQL: both databases must be able to hold it."""

import re

from gateway.core.errors import Invalid, NotFound

_ID = re.compile(r"[a-zA-Z0-9-]{1,80}")


def storable(text: str) -> bool:
    """Say whether both databases can hold ``text``: no NUL, no unpaired surrogate."""
    return "\x00" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def require_storable(text: str | None, field: str) -> None:
    """Raise Invalid, naming ``field``, when ``text`` cannot be stored."""
    if text is not None and not storable(text):
        raise Invalid(f"{field} must not contain NUL or unpaired surrogates", field=field)


def require_id(id: str, what: str) -> None:
    """Raise NotFound when ``id`` cannot be an id at all: the answer is the one for a missing row."""
    if _ID.fullmatch(id) is None:
        raise missing(what, id)


def missing(what: str, id: str) -> NotFound:
    """Return the one answer for a row that is missing and for one that is somebody else's."""
    return NotFound(f"no {what} {id[:80]!r}", code=f"{what.replace(' ', '_')}_not_found")
