import stat
import threading
from pathlib import Path

import pytest
from pydantic import SecretStr

from gateway.auth.keys import KEY_TEXT
from gateway.auth.master import MasterKeyError, open_keyring
from gateway.core.ids import KeyId
from gateway.settings import Settings

KEY_ID = KeyId("0123456789abcdefghjk")


def test_the_first_start_makes_a_key_file_that_only_its_owner_can_read(tmp_path: Path) -> None:
    first = open_keyring(Settings(data_dir=tmp_path / "new"))
    path = tmp_path / "new" / "master.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert open_keyring(Settings(data_dir=tmp_path / "new")) == first
    assert [entry.name for entry in path.parent.iterdir()] == ["master.key"]


def test_racing_starts_agree_on_one_key(tmp_path: Path) -> None:
    found: list[str] = []
    barrier = threading.Barrier(8)

    def start() -> None:
        barrier.wait()
        found.append(open_keyring(Settings(data_dir=tmp_path)).secret(KEY_ID))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_key_file_that_others_can_read_is_refused_with_the_cure(tmp_path: Path, mode: int) -> None:
    open_keyring(Settings(data_dir=tmp_path))
    path = tmp_path / "master.key"
    path.chmod(mode)
    with pytest.raises(MasterKeyError, match=f"{mode:04o}.*chmod 600 {path}"):
        open_keyring(Settings(data_dir=tmp_path))


def test_an_empty_or_short_master_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MasterKeyError, match="LOOPLINE_MASTER_KEY has 15 bytes; at least 16"):
        open_keyring(Settings(data_dir=tmp_path, master_key=SecretStr("x" * 15)))
    path = tmp_path / "master.key"
    path.touch(mode=0o600)
    with pytest.raises(MasterKeyError, match="has 0 bytes"):
        open_keyring(Settings(data_dir=tmp_path))


def test_an_injected_master_key_wins_and_leaves_no_file(tmp_path: Path) -> None:
    injected = Settings(data_dir=tmp_path, master_key=SecretStr("m" * 32))
    keyring = open_keyring(injected)
    assert not (tmp_path / "master.key").exists()
    assert keyring.text(KEY_ID) == "tml-0123456789abcdefghjk-" + keyring.secret(KEY_ID)
    assert KEY_TEXT.fullmatch(keyring.text(KEY_ID))


def test_a_secret_is_base62_of_the_hmac_and_does_not_show_in_repr() -> None:
    import base64
    import hashlib
    import hmac

    settings = Settings(master_key=SecretStr("m" * 32))
    keyring = open_keyring(settings)
    alphabet = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    number = 0
    for letter in keyring.secret(KEY_ID):
        number = number * 62 + alphabet.index(letter)
    assert number.to_bytes(32, "big") == hmac.new(b"m" * 32, KEY_ID.encode(), hashlib.sha256).digest()
    assert "mmm" not in repr(keyring)
    assert "mmm" not in repr(settings)
    assert base64.b64encode(b"m" * 32).decode() not in repr(keyring)
