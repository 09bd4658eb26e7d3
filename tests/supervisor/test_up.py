"""`loopline up`, as a person runs it: ready, restarted, stopped, crashed, refused. Real processes, scripted weights."""

import os
import signal
import socket
import stat
from pathlib import Path

from gateway.supervisor import groups
from tests.supervisor.live import MODEL, loopline, start_up, survivors, train_one_step, wait_for


def test_a_session_outlives_kill_9_of_every_process_in_turn(tmp_path: Path) -> None:
    with start_up(tmp_path / "data") as live:
        live.wait_ready()
        first = live.children()
        assert sorted(first) == ["engine", "gateway", "trainer"]
        versions: list[str] = []
        with live.client() as client:
            session = client.post("/sessions", json={"base_model": MODEL, "model_package_group": "kept"}).json()["id"]
            versions.append(train_one_step(client, session))
            for name in ("trainer", "engine", "gateway"):
                os.kill(first[name].pid, signal.SIGKILL)
                wait_for(
                    lambda name=name: live.children().get(name, first[name]).pid != first[name].pid and live.is_ready(),
                    live.output,
                )
                assert groups.members(first[name].pid) == []
                versions.append(train_one_step(client, session))
            sample = client.post(f"/sessions/{session}/sample", json={"prompt": [1, 2], "max_tokens": 2})

        assert versions == ["kept@1", "kept@2", "kept@3", "kept@4"]
        assert sample.json()["version"] == "kept@4"
        assert live.stop() == 0
    text = live.output.read_text()
    for name in first:
        assert f"{name} was ended by SIGKILL; starting again in 0.5 s" in text


def test_sigterm_stops_everything_in_order_and_leaves_no_process_and_no_record(tmp_path: Path) -> None:
    with start_up(tmp_path / "data") as live:
        live.wait_ready()
        records = list(live.children().values())
        assert len(survivors(records)) >= 3

        assert live.stop() == 0

        assert survivors(records) == []
        assert sorted(path.name for path in (tmp_path / "data" / "run").iterdir()) == ["catalog.toml", "lock"]
    order = [line.split(":")[0] for line in live.output.read_text().splitlines() if line.endswith(": stopping")]
    assert order == ["gateway", "trainer", "engine"]


def test_what_a_killed_supervisor_left_running_is_ended_by_the_next_start(tmp_path: Path) -> None:
    with start_up(tmp_path / "data") as live:
        live.wait_ready()
        orphans = live.children()
        live.stop(signal.SIGKILL)
        assert len(survivors(list(orphans.values()))) >= 3

        with start_up(tmp_path / "data", port=live.port) as second:
            second.wait_ready()
            assert survivors(list(orphans.values())) == []
            assert second.key == live.key
            assert second.stop(signal.SIGHUP) == 0
    text = live.output.read_text()
    for name, record in orphans.items():
        assert f"Ended {name} (process {record.pid}), left behind by a run that was killed." in text


def test_a_second_up_on_the_same_data_dir_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with start_up(tmp_path / "data") as live:
        live.wait_ready()
        before = live.children()
        second = loopline("up", "--engine", "scripted", "--data-dir", str(tmp_path / "data"))
        assert second.returncode == 1
        assert f"in use by another `loopline up` (process {live.process.pid})" in second.stderr
        assert "--data-dir" in second.stderr
        assert live.children() == before
        assert live.is_ready()


def test_a_taken_port_is_refused_before_anything_is_prepared(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = loopline("up", "--port", str(port), "--data-dir", str(tmp_path / "data"))
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr
    assert f"--port {port + 1}" in done.stderr
    assert not (tmp_path / "data" / "models").exists()


def test_a_model_that_leads_nowhere_is_refused_with_the_names_that_do(tmp_path: Path) -> None:
    done = loopline("up", "--model", "moon-cheese", "--data-dir", str(tmp_path / "data"), "--port", "18999")
    assert done.returncode == 1
    assert "'moon-cheese' is neither a catalogue name (smollm2-135m-instruct), nor a directory" in done.stderr


def test_a_child_that_cannot_start_ends_everything_and_its_log_is_shown(tmp_path: Path) -> None:
    """The gateway refuses a price list that is not there; it dies at once, each time."""
    prices = tmp_path / "no-such-prices.toml"
    env = {**os.environ, "LOOPLINE_PRICES": str(prices)}
    with start_up(tmp_path / "data", env=env) as live:
        assert live.process.wait(timeout=60) == 1
        text = live.output.read_text()
        assert "gateway exited with status" in text
        assert "3 times in a row: giving up" in text
        assert "Last lines of" in text
        assert prices.name in text
        assert live.children() == {}


def test_secrets_and_logs_are_for_their_owner_only(tmp_path: Path) -> None:
    with start_up(tmp_path / "data") as live:
        live.wait_ready()
        modes = {name: stat.S_IMODE((tmp_path / "data" / name).stat().st_mode) for name in (".", "master.key", "logs")}
        assert modes == {".": 0o700, "master.key": 0o600, "logs": 0o700}
        secret = live.key.rpartition("-")[2]
        assert live.stop(signal.SIGINT) == 0
    logs = "".join(path.read_text() for path in (tmp_path / "data" / "logs").iterdir())
    assert secret not in logs
