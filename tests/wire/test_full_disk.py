"""A disk with only its reserve left: new work is refused, accepted work and sampling go on, nothing is restarted."""

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from pydantic import SecretStr

from gateway.app import create_app
from gateway.core.errors import Unavailable
from gateway.store import space
from tests.core.test_adapter_files import tensors, write
from tests.stack import EngineEndpoint, free_port
from tests.tenancy.requests import BODIES, TINKER
from tests.wire.gateways import Gateway
from tests.wire.test_tinker_refusals import connect, new_client
from tests.wire.test_transfers import archive_of, imported
from tests.wire.training import BASE, datum, finish, new_session, run, submit

LARGE = [datum(length=150) for _ in range(120)]  # a body with a file of its own


@pytest.fixture
def here(gateway: Gateway, scripted_engine: EngineEndpoint) -> Iterator[Gateway]:
    """A gateway of this process on the database, files, engine and trainer of the others."""
    port, key = free_port(), SecretStr(scripted_engine.key)
    settings = gateway.settings.model_copy(update={"port": port, "engine_key": key})
    with serving(create_app(settings), port):
        yield replace(gateway, url=f"http://127.0.0.1:{port}")


@contextmanager
def serving(app: Any, port: int) -> Iterator[None]:
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_config=None))
    thread = threading.Thread(target=server.run, name="gateway")
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            thread.join(0.02)
        yield
    finally:
        server.should_exit = True
        thread.join()


def leave_room(monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    """Let every file system have ``size_bytes`` left besides its reserve."""
    found = SimpleNamespace(f_bavail=size_bytes, f_frsize=1, f_blocks=0)
    monkeypatch.setattr(space.os, "statvfs", lambda _: found)


def asked(here: Gateway, version: str) -> dict[str, httpx.Response]:
    """Return what each way to sample answers."""
    native = {"prompt": [97, 98], "max_tokens": 3, "seed": 1}
    openai = {"model": f"{version}@1", "prompt": [97, 98], "max_tokens": 3, "seed": 1}
    with here.client() as client, here.openai_client() as completions:
        return {
            "native": client.post(f"/sessions/{version}/sample", json=native, headers={"Idempotency-Key": "full"}),
            "openai": completions.post("/completions", json=openai),
        }


def test_a_full_disk_refuses_work_and_saves_while_loaded_versions_are_sampled_until_there_is_room(
    here: Gateway, published: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with here.client() as client:
        session = new_session(client)["id"]
        accepted = submit(client, session, "forward_backward", data=[datum()])["id"]
        with monkeypatch.context() as full:
            full.setattr(space, "RESERVE_SHARE", 2.0)
            full.setattr(space, "RESERVE_BYTES", 1 << 62)
            for verb, body in (
                ("forward_backward", {"data": [datum()]}),
                ("forward_backward", {"data": LARGE}),
                ("optim_step", {}),
                ("save_weights", {}),
            ):
                refused = client.post(f"/sessions/{session}/{verb}", json={**body, "seq": 2})
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "disk_full"), verb
            refused = client.post("/logprobs", json={"base_model": BASE, "prompt": [97, 98], "targets": [98, 99]})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "disk_full")
            assert finish(client, accepted)["status"] == "completed"
            for way, answer in asked(here, published).items():
                assert answer.status_code == 200, (way, answer.text)

        assert len(client.get(f"/sessions/{session}/operations").json()["data"]) == 1  # nothing was half recorded
        run(client, session, "forward_backward", data=LARGE, seq=2)
        run(client, session, "optim_step", seq=3)


def test_the_reserve_is_256_mib_or_the_twentieth_part_of_a_small_disk_and_work_may_not_reach_into_it(
    tmp_path: Path,
) -> None:
    disk = shutil.disk_usage(tmp_path)
    free, reserve = disk.free, min(256 * 1024 * 1024, disk.total // 20)
    slack = 64 * 1024 * 1024  # others write to this disk meanwhile
    assert free > reserve + 2 * slack, "this test needs a disk with room"

    space.require_space(tmp_path / "not" / "there" / "yet", free - reserve - slack)
    with pytest.raises(Unavailable) as full:
        space.require_space(tmp_path, free - reserve + slack)
    assert full.value.code == "disk_full"


def test_an_adapter_or_a_loss_that_would_reach_into_the_reserve_is_refused_before_it_is_written(
    here: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = archive_of(write(tmp_path, tensors()))
    with here.client() as client, connect(here, here.keys.owner) as tinker:
        loss = {**BODIES[TINKER, "POST", "/api/v1/create_custom_loss"], "session_id": new_client(tinker)}
        with monkeypatch.context() as full:
            leave_room(full, len(content))  # for the archive, not for what is in it
            refused = imported(client, "imported", content)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "disk_full")
            leave_room(full, 0)
            refused = tinker.post("/create_custom_loss", json=loss)
            assert (refused.status_code, refused.json()["code"]) == (503, "disk_full")
        assert imported(client, "imported", content).status_code == 202
        assert tinker.post("/create_custom_loss", json=loss).status_code == 200
        leave_room(monkeypatch, 0)
        assert tinker.post("/create_custom_loss", json=loss).status_code == 200  # its first answer may have been lost
