"""How a version is named: four spellings of one row, and its id.

``group@7`` and ``group@champion`` are the native ones; ``tinker://<session>/<space>/<name>`` (a session's id, or its
client's number for it) and a model-package ARN are what other clients write. Every part matches a strict pattern; none
ever becomes a path.
"""

import re
from dataclasses import dataclass

from gateway.core.errors import Invalid
from gateway.core.ids import VersionId
from gateway.core.versions import GROUP_NAME, Version, VersionKind

LATEST = "latest"
RESERVED = frozenset({LATEST, "history", "aliases"})  # the others are paths beside the versions of a group
ALIAS = re.compile(r"[a-zA-Z][a-zA-Z0-9_-]{0,62}")
ALIAS_RULE = "1 to 63 of a-z, A-Z, 0-9, '_' and '-', a letter first"
NAME = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,126}[a-zA-Z0-9])?")
NAME_RULE = "1 to 128 of a-z, A-Z, 0-9, '_', '.' and '-', neither first nor last a mark"

_NUMBER = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)
_ID = re.compile(r"ver-[a-z0-9]{1,64}")
_TINKER = re.compile(r"tinker://([a-zA-Z0-9:-]{1,128})/(weights|sampler_weights|external_weights)/([^/]{1,128})")
_ARN = re.compile(r"arn:aws[a-z-]{0,16}:sagemaker:[a-z0-9-]{9,16}:[0-9]{12}:model-package/([^/]{1,63})/([0-9]{1,9})")
_EXTERNAL = "external."  # adapters that were saved to be taken away have a name space of their own
_SPACES = {
    "weights": (VersionKind.STATE, ""),
    "external_weights": (VersionKind.ADAPTER, _EXTERNAL),
    "sampler_weights": (VersionKind.ADAPTER, ""),
}
PARTITION = "arn:aws:sagemaker:us-east-1:000000000000"  # accepted in any region and account


@dataclass(frozen=True, slots=True)
class ById:
    """``ver-...``."""

    version_id: VersionId


@dataclass(frozen=True, slots=True)
class Numbered:
    """``group@7``, or the ARN of a model package."""

    group: str
    number: int


@dataclass(frozen=True, slots=True)
class Aliased:
    """``group@champion``; ``latest`` is the newest version that can be used."""

    group: str
    alias: str


@dataclass(frozen=True, slots=True)
class Named:
    """A Tinker path: the version of that kind that a session saved under that name, or (an id) under none."""

    session: str
    kind: VersionKind
    name: str


Address = ById | Numbered | Aliased | Named


def parse_address(text: str) -> Address | None:
    """Return what ``text`` names, None when it is none of the spellings."""
    if _ID.fullmatch(text):
        return ById(VersionId(text))
    if found := _TINKER.fullmatch(text):
        session, space, name = found.groups()
        kind, prefix = _SPACES[space]
        return Named(session, kind, prefix + name) if NAME.fullmatch(name) else None
    if found := _ARN.fullmatch(text):
        group, number = found.groups()
        return Numbered(group, int(number)) if GROUP_NAME.fullmatch(group) and _NUMBER.fullmatch(number) else None
    group, _, rest = text.partition("@")
    if GROUP_NAME.fullmatch(group) is None:
        return None
    if _NUMBER.fullmatch(rest):
        return Numbered(group, int(rest))
    return Aliased(group, rest) if ALIAS.fullmatch(rest) else None


def tinker_path(version: Version, session: str) -> str | None:
    """Return the version's Tinker path below what its session is called; a merged model has none."""
    name = version.labels.name or version.id
    for space, (kind, prefix) in _SPACES.items():
        if version.kind is kind and name.startswith(prefix):
            return f"tinker://{session}/{space}/{name.removeprefix(prefix)}"
    return None


def name_in(space: str, name: str, *, field: str = "name") -> str:
    """Return what a version saved as ``name`` in a Tinker path's ``space`` is called.

    Raises:
        Invalid: not of the pattern, or like an id.
    """
    return _SPACES[space][1] + check_name(name, field=field)


def arn(version: Version) -> str:
    """Return the version's ARN; which region and account it names means nothing here."""
    return f"{PARTITION}:model-package/{version.group}/{version.number}"


def check_alias(alias: str, *, field: str = "alias") -> str:
    """Return ``alias`` if a user may set it.

    Raises:
        Invalid: not of the pattern, or reserved (``latest`` moves by itself).
    """
    if ALIAS.fullmatch(alias) is None:
        raise Invalid(f"alias {alias[:80]!r} must be {ALIAS_RULE}", field=field)
    if alias in RESERVED:
        raise Invalid(f"{alias} is not for users to set; choose another alias", code="reserved_alias", field=field)
    return alias


def check_name(name: str, *, field: str = "name") -> str:
    """Return ``name`` if a save may carry it.

    Raises:
        Invalid: not of the pattern, or like an id.
    """
    if NAME.fullmatch(name) is None or name.startswith("ver-"):
        raise Invalid(f"version name {name[:80]!r} must be {NAME_RULE}, and no id", field=field)
    return name
