"""Commands that ask the running gateway, and the README's blocks, copied out and run."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import openai
import pytest

from gateway.supervisor.terminal import snippets
from tests.cli.runner import loopline
from tests.supervisor.live import MODEL, LiveUp, clean_environment, train_one_step

ROOT = Path(__file__).parents[2]


def block(name: str) -> str:
    """Return the README's code block that stands under ``<!-- tested: name -->``."""
    found = re.search(rf"<!-- tested: {name} -->\n```\w+\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def test_the_readmes_blocks_work_as_they_stand(live: LiveUp) -> None:
    shell = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block("curl")],
        env=live.environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert shell.returncode == 0, shell.stdout + shell.stderr
    answers = [json.loads(line) for line in shell.stdout.splitlines()]
    assert [answer.get("status") for answer in answers[:-1]] == ["running", "queued", "queued", "completed"]
    assert answers[-1]["version"] == answers[-2]["result"]["version"]
    sampled = answers[-1]["sequences"][0]  # the scripted engine may end an answer at any token
    assert 1 <= len(sampled["tokens"]) <= 8
    assert len(sampled["tokens"]) == 8 or sampled["stop_reason"] == "stop"

    for name in ("openai", "python"):
        done = subprocess.run(
            [sys.executable, "-c", block(name)],
            env=live.environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("\n")


def test_what_up_prints_to_paste_works_as_it_stands(live: LiveUp) -> None:
    for title, language, text in snippets(url=live.url, key=live.key, model=MODEL):
        assert text in live.output.read_text(), title
        command = ["bash", "-c", text] if language == "bash" else [sys.executable, "-c", text]
        done = subprocess.run(
            command, env=clean_environment(), capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        if language == "bash":
            assert json.loads(done.stdout)["status"] == "running"


def test_sessions_are_listed_and_stopped_with_the_local_key(live: LiveUp) -> None:
    with live.client() as client:
        created = client.post("/sessions", json={"base_model": MODEL, "name": "to-stop", "ttl_seconds": 3600}).json()
    where = ("--data-dir", str(live.data_dir))

    table = loopline("sessions", "list", *where).stdout
    assert re.search(
        rf"^{created['id']} +to-stop +{MODEL} +running +idle +0 .*in 59 min +0 +\$0.00$", table, re.MULTILINE
    )

    stopped = loopline("sessions", "stop", "to-stop", *where)
    assert (stopped.returncode, stopped.stdout) == (0, f"Session {created['id']} is stopped.\n")
    listed = json.loads(loopline("sessions", "list", "--json", *where).stdout)
    assert created["id"] not in [session["id"] for session in listed]
    everything = json.loads(loopline("sessions", "list", "--all", "--json", *where).stdout)
    assert {session["id"]: session["status"] for session in everything}[created["id"]] == "stopped"


def test_usage_shows_tokens_and_dollars_that_add_up(live: LiveUp) -> None:
    with live.client() as client:
        session = client.post("/sessions", json={"base_model": MODEL}).json()["id"]
        train_one_step(client, session)
    where = ("--session", session, "--base-url", live.url, "--api-key", live.key)

    bill = json.loads(loopline("usage", "--json", *where).stdout)
    assert [(row["meter"], row["quantity"]) for row in bill["data"]] == [("train", 3)]
    assert bill["total_cost_nanos"] == 360  # 3 tokens at 120,000,000 nano-USD per million

    table = loopline("usage", *where).stdout
    assert re.search(rf"{session} +{MODEL} +train +3 +\$0\.00000036$", table, re.MULTILINE)
    assert table.endswith("\nTotal $0.00000036\n")


def test_a_refusal_is_one_line_on_standard_error_and_status_1(live: LiveUp) -> None:
    done = loopline("sessions", "stop", "nobody", "--data-dir", str(live.data_dir))
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "error: no such session\n")


def test_a_wrong_key_and_a_gateway_that_is_away_are_said_plainly(live: LiveUp) -> None:
    wrong = loopline("sessions", "list", "--base-url", live.url, "--api-key", "tml-nonsense")
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("error: missing or invalid API key")
    away = loopline("usage", "--base-url", "http://127.0.0.1:9", "--api-key", "tml-nonsense")
    assert away.returncode == 1
    assert "no answer from http://127.0.0.1:9" in away.stderr
    assert "Does `loopline up` run?" in away.stderr


def test_a_key_made_by_the_cli_opens_the_gateway_until_it_is_revoked(live: LiveUp) -> None:
    where = ("--data-dir", str(live.data_dir))
    made = json.loads(loopline("keys", "create", "ci", "--json", *where).stdout)
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key=made["key"], max_retries=0)
    assert MODEL in [model.id for model in client.models.list()]

    assert loopline("keys", "revoke", made["key"], *where).returncode == 0
    with pytest.raises(openai.AuthenticationError):
        list_for(5, client)  # within a second, as tests/wire/test_keys.py shows


def list_for(seconds: float, client: openai.OpenAI) -> None:
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        client.models.list()


def test_doctor_knows_its_own_gateway_and_lists_the_models(live: LiveUp) -> None:
    environment = {"LOOPLINE_PORT": str(live.port)}
    checks = json.loads(loopline("doctor", "--json", "--data-dir", str(live.data_dir), env=environment).stdout)
    port = next(check for check in checks if check["name"] == "port")
    assert port["verdict"] == "ok"
    assert port["found"].endswith("is this data directory's running gateway")
    models = json.loads(loopline("models", "list", "--json", "--data-dir", str(live.data_dir)).stdout)
    assert [(model["name"], model["context_length"], model["vocab_size"]) for model in models] == [(MODEL, 2048, 49152)]
