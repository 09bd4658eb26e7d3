"""The master key: injected, or a file that only its owner can read, made on first start."""

import os
import secrets
import stat
from pathlib import Path

from gateway.auth.keys import Keyring
from gateway.settings import Settings

_MIN_BYTES = 16


class MasterKeyError(RuntimeError):
    """The master key cannot be used; the message says why and what to do."""


def open_keyring(settings: Settings) -> Keyring:
    """Return the keyring of the injected master key, or of the file's; the file is made when it is missing.

    Raises:
        MasterKeyError: too short, or the file is readable for others.
    """
    if settings.master_key is not None:
        return Keyring(master_key=_checked(settings.master_key.get_secret_value(), "LOOPLINE_MASTER_KEY"))
    path = settings.resolved_master_key_file
    if not path.exists():
        _create(path)
    return Keyring(master_key=_read(path))


def _create(path: Path) -> None:
    """Write a complete file under another name and link it into place: the first of two racing starts wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return
    finally:
        draft.unlink()
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _read(path: Path) -> bytes:
    with path.open() as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise MasterKeyError(
                f"{path} has mode {mode:04o}: group or others can read the key that all API keys derive from; "
                f"run: chmod 600 {path}"
            )
        return _checked(file.read(), str(path))


def _checked(text: str, source: str) -> bytes:
    key = text.strip().encode()
    if len(key) < _MIN_BYTES:
        raise MasterKeyError(f"the master key in {source} has {len(key)} bytes; at least {_MIN_BYTES} are needed")
    return key
