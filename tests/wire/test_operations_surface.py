"""Health, request ids, logs, and what the gateway refuses to start with."""

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from gateway.auth.keys import LOCAL_KEY_NAME, local_key
from gateway.auth.master import open_keyring
from gateway.core.clock import SystemClock
from tests.stack import EngineEndpoint
from tests.wire.gateways import Gateway, running_gateway
from tests.wire.training import BASE, new_session


def test_live_never_depends_on_anything_and_ready_says_what_is_missing(gateway: Gateway) -> None:
    assert httpx.get(f"{gateway.url}/livez").json() == {"status": "ok"}
    ready = httpx.get(f"{gateway.url}/readyz")
    assert ready.status_code == 503
    assert ready.json()["reasons"] == [
        "untrained: no engine is ready",
        "untrained: no trainer has shown itself lately",
    ]


def test_live_answers_at_once_while_the_database_is_locked(scripted_engine: EngineEndpoint, tmp_path: Path) -> None:
    with running_gateway(scripted_engine, tmp_path / "data", trainer=False) as gateway:
        database = sqlite3.connect(gateway.settings.data_dir / "loopline.db", isolation_level=None)
        database.execute("BEGIN EXCLUSIVE")
        try:
            with httpx.Client(base_url=gateway.url, timeout=5) as client:
                assert [client.get("/livez").status_code for _ in range(20)] == [200] * 20
        finally:
            database.close()


def test_ready_once_engine_and_trainer_are_there(scripted_engine: EngineEndpoint, tmp_path: Path) -> None:
    catalog = scripted_engine.catalog()
    with running_gateway(scripted_engine, tmp_path / "alone", trainer=False, catalog=catalog) as gateway:
        answer = httpx.get(f"{gateway.url}/readyz")
        assert answer.status_code == 503
        assert answer.json()["reasons"] == [f"{BASE}: no trainer has shown itself lately"]
    with running_gateway(scripted_engine, tmp_path / "both", trainer=True, catalog=catalog) as gateway:
        answer = httpx.get(f"{gateway.url}/readyz")
        while answer.status_code == 503:
            answer = httpx.get(f"{gateway.url}/readyz")
        assert answer.json() == {"status": "ready", "reasons": []}


def test_a_request_id_is_taken_over_when_it_is_plain_and_made_when_it_is_not(gateway: Gateway) -> None:
    with gateway.client() as client:
        given = client.get("/sessions", headers={"X-Request-Id": "my-id.7"})
        made = client.get("/sessions", headers={b"X-Request-Id": "a b\u00e9".encode()})
        long = client.get("/sessions", headers={"X-Request-Id": "x" * 65})
    assert given.headers["X-Request-Id"] == "my-id.7"
    assert made.headers["X-Request-Id"].startswith("req-")
    assert long.headers["X-Request-Id"].startswith("req-")


def test_logs_are_json_lines_without_keys_or_forged_lines(gateway: Gateway) -> None:
    key = gateway.keys.owner
    with gateway.client() as client:
        client.get(f"/sessions/{key}%0A%7B%22forged%22%3A1%7D", headers={"X-Request-Id": "forger"})
    lines = gateway.log.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert not any("forged" in record for record in records)
    mine = [record for record in records if record.get("request_id") == "forger"]
    assert [(record["status"], record["method"]) for record in mine] == [(404, "GET")]
    assert key.split("-")[2] not in gateway.log.read_text()
    assert "tml-" + key.split("-")[1][:8] + "..." in mine[0]["path"]


def test_a_warning_of_a_library_is_one_json_line() -> None:
    script = "import warnings; from gateway import logs; logs.configure(); warnings.warn('first\\nsecond')"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    (line,) = answer.stderr.splitlines()
    assert "first" in json.loads(line)["event"]


def test_the_local_key_is_made_once_and_opens_the_default_project(gateway: Gateway) -> None:
    keyring = open_keyring(gateway.settings)
    now = SystemClock().now()
    first = gateway.in_unit(lambda unit: local_key(unit, keyring, at=now))
    again = gateway.in_unit(lambda unit: local_key(unit, keyring, at=now))
    assert first == again == keyring.text(keyring.local_key_id)
    named = [key for key in gateway.in_unit(lambda unit: unit.keys.all()) if key.name == LOCAL_KEY_NAME]
    assert len(named) == 1
    with gateway.client(first) as client:
        assert client.get("/sessions").json() == {"data": [], "next": None}


def test_a_session_survives_a_killed_gateway(scripted_engine: EngineEndpoint, tmp_path: Path) -> None:
    with running_gateway(scripted_engine, tmp_path / "data", trainer=False) as gateway:
        with gateway.client() as client:
            session = new_session(client)
            operation = client.post(f"/sessions/{session['id']}/optim_step", json={}).json()
        os.kill(gateway.process.pid, signal.SIGKILL)
        gateway.process.wait()
        port = gateway.url.rsplit(":", 1)[1]
        env = {**os.environ, "LOOPLINE_DATA_DIR": str(gateway.settings.data_dir), "LOOPLINE_PORT": port}
        env["LOOPLINE_ENGINE_KEY"] = scripted_engine.key
        child = subprocess.Popen([sys.executable, "-m", "gateway"], env=env, stderr=subprocess.DEVNULL)
        try:
            with gateway.client() as client:
                while True:
                    try:
                        read = client.get(f"/operations/{operation['id']}").json()
                        break
                    except httpx.TransportError:
                        assert child.poll() is None
                assert read == operation
                assert client.get(f"/sessions/{session['id']}").json()["id"] == session["id"]
        finally:
            child.send_signal(signal.SIGTERM)
            assert child.wait(timeout=30) in (0, -signal.SIGTERM)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"LOOPLINE_CATALOG": "/nonexistent/catalog.toml"}, "/nonexistent/catalog.toml"),
        ({"LOOPLINE_MASTER_KEY": "short"}, "the master key in LOOPLINE_MASTER_KEY has 5 bytes"),
        ({"LOOPLINE_PRICES": "prices.toml"}, "no price at"),
    ],
)
def test_a_wrong_file_stops_the_start_and_is_named(
    gateway: Gateway, tmp_path: Path, env: dict[str, str], message: str
) -> None:
    (tmp_path / "prices.toml").write_text(
        '[[price]]\nbase_model = "other"\nfrom = 2020-01-01T00:00:00Z\n'
        "prefill = 1\ncached_prefill = 1\nsample = 1\ntrain = 1\nstorage = 1\n"
    )
    environment = {
        **os.environ,
        "LOOPLINE_DATA_DIR": str(gateway.settings.data_dir),
        "LOOPLINE_PORT": "0",
        **{name: str(tmp_path / value) if name == "LOOPLINE_PRICES" else value for name, value in env.items()},
    }
    done = subprocess.run(
        [sys.executable, "-m", "gateway"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_client_that_leaves_before_its_request_is_complete_is_no_failure(gateway: Gateway, session: str) -> None:
    address = httpx.URL(gateway.url)
    head = (
        f"POST /training/v1/sessions/{session}/forward HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n"
        f"Authorization: Bearer {gateway.keys.owner}\r\nContent-Type: application/json\r\nX-Request-Id: leaver\r\n\r\n"
    )
    with socket.create_connection((address.host, address.port or 0)) as client:
        client.sendall(head.encode() + b'{"data": [')

    def events() -> list[dict[str, object]]:
        lines = [json.loads(line) for line in gateway.log.read_text().splitlines() if '"leaver"' in line]
        return [line for line in lines if line["event"] != "request"]

    while not events():
        time.sleep(0.01)
    assert [event["level"] for event in events()] == ["info"]
