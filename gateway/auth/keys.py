"""API keys: ``tml-`` + 20-character key id + ``-`` + secret.

A secret is base62(HMAC-SHA256(master key, key id)), always 43 characters. It is derived when needed and never stored,
so the database alone opens nothing, and a key is recomputed and compared in constant time. Unknown, revoked, expired
and misspelt keys are refused with one and the same error.
"""

import hashlib
import hmac
import re
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache

from gateway.auth.known import KnownKeys
from gateway.core.errors import Conflict, Forbidden, NotFound, Unauthenticated
from gateway.core.ids import KeyId, ProjectId, new_key_id
from gateway.core.ports import UnitOfWork
from gateway.core.principals import ALL_SCOPES, Key, Principal, Scope

DEFAULT_PROJECT = "default"
LOCAL_KEY_NAME = "local"
SECRET_LENGTH = 43  # 62 ** 43 > 2 ** 256
KEY_TEXT = re.compile(r"tml-([0-9a-z]{20})-([0-9A-Za-z]{43})", re.ASCII)

_BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_BASE32 = "0123456789abcdefghjkmnpqrstvwxyz"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyring:
    """The master key and what derives from it."""

    master_key: bytes = field(repr=False)

    def secret(self, key_id: KeyId) -> str:
        """Return the 43-character secret of ``key_id``."""
        return _secret(self.master_key, key_id)

    def text(self, key_id: KeyId) -> str:
        """Return the key as its holder writes it."""
        return f"tml-{key_id}-{self.secret(key_id)}"

    def signature(self, text: str) -> str:
        """Return what shows that this gateway, or one with the same master key, wrote ``text``."""
        return self._mac(f"link {text}").hex()

    @property
    def local_key_id(self) -> KeyId:
        """The id of the key made on first start; it follows from the master key, so that two starts make one key."""
        number = int.from_bytes(self._mac("id of the local key"))
        return KeyId("".join(_BASE32[(number >> (5 * place)) & 31] for place in range(20)))

    def _mac(self, text: str) -> bytes:
        return _mac(self.master_key, text)


def _mac(master_key: bytes, text: str) -> bytes:
    return hmac.digest(master_key, text.encode(), hashlib.sha256)


@lru_cache(maxsize=1024)  # a busy key's is wanted with every request
def _secret(master_key: bytes, key_id: KeyId) -> str:
    number = int.from_bytes(_mac(master_key, key_id))
    digits: list[str] = []
    for _ in range(SECRET_LENGTH):
        number, digit = divmod(number, 62)
        digits.append(_BASE62[digit])
    return "".join(reversed(digits))


async def mint(
    unit: UnitOfWork,
    keyring: Keyring,
    *,
    project_id: ProjectId,
    name: str,
    scopes: frozenset[Scope],
    at: datetime,
    expires_at: datetime | None = None,
) -> tuple[Key, str]:
    """Record a new key and return it with its text, which is shown once."""
    key = Key(
        id=new_key_id(),
        project_id=project_id,
        name=name,
        scopes=scopes,
        created_at=at,
        expires_at=expires_at,
        revoked_at=None,
    )
    await unit.keys.add(key)
    return key, keyring.text(key.id)


async def rotate(
    unit: UnitOfWork, keyring: Keyring, key_id: KeyId, *, at: datetime, grace: timedelta
) -> tuple[Key, str]:
    """Record a successor with the same project, name, scopes and end, and let the old key end after ``grace``.

    Raises:
        NotFound: no such key.
        Conflict: ``key_ended``, it was revoked or has expired.
    """
    old = await unit.keys.get(key_id)
    if old is None:
        raise NotFound("no such key", code="key_not_found", field="key")
    if old.ended(at):
        raise Conflict(f"key {key_id} has ended; make a new one", code="key_ended", field="key")
    successor = await mint(
        unit,
        keyring,
        project_id=old.project_id,
        name=old.name,
        scopes=old.scopes,
        at=at,
        expires_at=old.expires_at,
    )
    if grace:
        await unit.keys.expire(key_id, at + grace)
    else:
        await unit.keys.revoke(key_id, at)
    return successor


async def local_key(unit: UnitOfWork, keyring: Keyring, *, at: datetime) -> str | None:
    """Return the text of the key ``local`` of project ``default``, both made on the first call.

    None when the key has been revoked: it is not made a second time.
    """
    key_id = keyring.local_key_id
    key = await unit.keys.get(key_id)
    if key is None:
        project_id = await unit.keys.ensure_project(DEFAULT_PROJECT)
        key = Key(
            id=key_id,
            project_id=project_id,
            name=LOCAL_KEY_NAME,
            scopes=ALL_SCOPES,
            created_at=at,
            expires_at=None,
            revoked_at=None,
        )
        await unit.keys.add(key)
    return keyring.text(key_id) if key.revoked_at is None else None


async def authenticate(keys: KnownKeys, keyring: Keyring, text: str, *, at: datetime) -> Principal:
    """Return whom the key ``text`` stands for.

    Raises:
        Unauthenticated: the same for a malformed, unknown, revoked or expired key.
    """
    match = KEY_TEXT.fullmatch(text)
    if match is None:
        raise _refusal()
    key_id = KeyId(match[1])
    if not hmac.compare_digest(keyring.secret(key_id), match[2]):
        raise _refusal()
    return await holder(keys, key_id, at=at)


async def holder(keys: KnownKeys, key_id: KeyId, *, at: datetime) -> Principal:
    """Return whom the key called ``key_id`` stands for; that a caller has its secret, somebody else must check.

    Raises:
        Unauthenticated: the same for an unknown, revoked or expired key.
    """
    key = await keys.get(key_id)
    if key is None or key.ended(at):
        raise _refusal()
    return Principal(project_id=key.project_id, key_id=key.id, scopes=key.scopes)


def require(principal: Principal, *scopes: Scope) -> None:
    """Raise unless the key has one of ``scopes``; ``admin`` has them all.

    Raises:
        Forbidden: ``missing_scope``.
    """
    if not principal.scopes & {*scopes, Scope.ADMIN}:
        wanted = " or ".join(scopes)
        raise Forbidden(f"this key lacks the scope {wanted}", code="missing_scope", details={"scope": wanted})


def _refusal() -> Unauthenticated:
    return Unauthenticated("missing or invalid API key; send 'Authorization: Bearer tml-...'")
