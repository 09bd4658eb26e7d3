"""Commands that need no running gateway: keys, database, doctor, models, version, and the numbers they print."""

import json
import stat
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.text import Text

from gateway.cli.app import create_cli
from gateway.cli.common import ago, dollars
from tests.cli.runner import loopline


@pytest.fixture
def where(tmp_path: Path) -> tuple[str, str]:
    """The data directory, with a database."""
    location = ("--data-dir", str(tmp_path / "data"))
    assert loopline("db", "upgrade", *location).returncode == 0
    return location


def checks(*arguments: str, **env: str) -> tuple[int, dict[str, dict[str, str]]]:
    done = loopline("doctor", "--json", *arguments, env=env)
    return done.returncode, {check["name"]: check for check in json.loads(done.stdout)}


def test_a_key_is_shown_once_listed_without_its_secret_and_revoked(where: tuple[str, str]) -> None:
    made = json.loads(loopline("keys", "create", "laptop", "--scope", "inference", "--json", *where).stdout)
    prefix, key_id, secret = made["key"].split("-")
    assert (prefix, key_id, len(secret), made["scopes"]) == ("tml", made["id"], 43, ["inference"])

    table = loopline("keys", "list", *where).stdout
    assert table.splitlines()[0].split() == ["id", "name", "scopes", "created", "standing", "project"]
    assert table.splitlines()[1].split()[:3] == [made["id"], "laptop", "inference"]
    assert secret not in table

    assert loopline("keys", "revoke", made["id"], *where).stdout == f"Key {made['id']} (laptop) is revoked.\n"
    assert " revoked " in loopline("keys", "list", *where).stdout


def test_a_rotated_key_has_a_successor_and_the_audit_log_says_so(where: tuple[str, str]) -> None:
    old = json.loads(loopline("keys", "create", "ci", "--project", "team", "--scope", "train", "--json", *where).stdout)
    new = json.loads(loopline("keys", "rotate", old["id"], "--json", *where).stdout)
    assert (new["name"], new["scopes"], new["project_id"]) == ("ci", ["train"], old["project_id"])
    listed = {one["id"]: one for one in json.loads(loopline("keys", "list", "--json", *where).stdout)}
    assert listed[old["id"]]["revoked_at"] is not None
    assert (listed[new["id"]]["revoked_at"], listed[new["id"]]["project"]) == (None, "team")
    assert loopline("keys", "rotate", old["id"], *where).stderr.startswith(f"error: key {old['id']} has ended")

    entries = json.loads(loopline("audit", "--project", "team", "--json", *where).stdout)
    assert [entry["action"] for entry in entries] == ["keys rotate", "keys create"]
    assert entries[0]["subject"] == f"key={new['id']}, name=ci, replaces={old['id']}"
    assert "command line" in loopline("audit", *where).stdout


def test_projects_are_made_once_and_listed_by_name(where: tuple[str, str]) -> None:
    assert loopline("projects", "create", "team", *where).stdout.startswith("Project team is proj-")
    assert loopline("projects", "create", "team", *where).stderr == "error: there is a project 'team' already\n"
    loopline("keys", "create", "ci", "--project", "team", *where)
    assert [row["name"] for row in json.loads(loopline("projects", "list", "--json", *where).stdout)] == ["team"]
    assert loopline("projects", "list", *where).stdout.splitlines()[1].split()[1:] == ["team", "1"]
    assert " team" in loopline("keys", "list", *where).stdout


def test_a_read_only_key_has_no_other_scope(where: tuple[str, str]) -> None:
    done = loopline("keys", "create", "x", "--scope", "read-only", "--scope", "train", *where)
    assert (done.returncode, done.stdout) == (1, "")


def helps(command: Any) -> Iterator[str]:
    """Yield every text of ``--help``, of the command and those below it."""
    yield command.help or ""
    for parameter in command.params:
        yield getattr(parameter, "help", None) or ""
    for below in getattr(command, "commands", {}).values():
        yield from helps(below)


def test_no_help_loses_words_to_markup() -> None:
    texts = list(helps(typer.main.get_command(create_cli())))

    assert sum("default: " in text for text in texts) > 5
    assert [text for text in texts if Text.from_markup(text).plain != text] == []


def test_the_key_alone_is_on_standard_output(where: tuple[str, str]) -> None:
    done = loopline("keys", "create", "pipe", "--expires-in-days", "1.5", *where)
    assert done.stdout.count("\n") == 1
    assert done.stdout.startswith("tml-")
    assert "It is not shown again" in done.stderr
    listed = json.loads(loopline("keys", "list", "--json", *where).stdout)
    lifetime = datetime.fromisoformat(listed[0]["expires_at"]) - datetime.fromisoformat(listed[0]["created_at"])
    assert lifetime == timedelta(days=1.5)


def test_revoking_a_key_that_is_not_there_says_so(where: tuple[str, str]) -> None:
    done = loopline("keys", "revoke", "0" * 20, *where)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: no key has the id {'0' * 20}; `loopline keys list` shows them\n"


def test_upgrading_twice_changes_nothing_and_files_are_private(where: tuple[str, str]) -> None:
    loopline("keys", "create", "first", *where)
    assert loopline("db", "upgrade", *where).stdout == "The database is up to date.\n"
    data_dir = Path(where[1])
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (data_dir, data_dir / "master.key")]
    assert modes == [0o700, 0o600]
    assert len(json.loads(loopline("keys", "list", "--json", *where).stdout)) == 1


def test_doctor_is_content_with_a_fresh_directory(tmp_path: Path) -> None:
    status, found = checks("--data-dir", str(tmp_path / "new"), LOOPLINE_PORT="18977")
    assert {name: check["verdict"] for name, check in found.items() if check["verdict"] == "wrong"} == {}
    assert status == 0
    assert not (tmp_path / "new").exists()


def test_doctor_says_what_to_do_about_a_master_key_that_others_can_read(where: tuple[str, str]) -> None:
    loopline("keys", "create", "any", *where)
    path = Path(where[1]) / "master.key"
    path.chmod(0o644)
    status, found = checks(*where)
    assert status == 1
    assert found["master key"]["verdict"] == "wrong"
    assert found["master key"]["advice"] == f"run: chmod 600 {path}"
    assert loopline("keys", "create", "refused", *where).returncode == 1


def test_doctor_fails_when_the_cpu_plugin_is_switched_off(tmp_path: Path) -> None:
    status, found = checks("--data-dir", str(tmp_path), VLLM_PLUGINS="")
    if "CUDA build" in found["engine"]["found"]:
        pytest.skip("this environment has the CUDA build of vLLM")
    assert status == 1
    assert "without Loopline's plugin" in found["engine"]["found"]


def test_doctor_fails_on_a_database_that_is_away_and_hides_its_password(tmp_path: Path) -> None:
    url = "postgresql+psycopg://loopline:hunter2@127.0.0.1:9/loopline"
    done = loopline("doctor", "--data-dir", str(tmp_path), env={"LOOPLINE_DATABASE_URL": url})
    assert done.returncode == 1
    assert "LOOPLINE_DATABASE_URL is right" in done.stdout
    assert "hunter2" not in done.stdout + done.stderr


def test_doctor_fails_on_an_old_schema(tmp_path: Path) -> None:
    (tmp_path / "loopline.db").touch()
    status, found = checks("--data-dir", str(tmp_path))
    assert (status, found["database"]["verdict"]) == (1, "wrong")
    assert found["database"]["advice"].startswith("the database has no tables of Loopline: run `loopline db upgrade`")


STORE_COMMANDS = [
    ("keys", "list"),
    ("projects", "list"),
    ("audit",),
    ("ledger", "statement", "proj-x", "2026-11"),
    ("ledger", "credit", "proj-x", "1", "--reason", "a gift"),
    ("prices", "list"),
]


@pytest.mark.parametrize("command", STORE_COMMANDS, ids=" ".join)
def test_a_database_without_tables_is_named_in_one_line_that_says_what_to_run(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "loopline.db").touch()
    done = loopline(*command, "--data-dir", str(tmp_path))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: the database has no tables of Loopline: run `loopline db upgrade`")


@pytest.mark.parametrize("command", [*STORE_COMMANDS, ("db", "upgrade")], ids=" ".join)
def test_a_database_that_is_away_is_named_without_its_password(tmp_path: Path, command: tuple[str, ...]) -> None:
    url = "postgresql+psycopg://loopline:hunter2@127.0.0.1:9/loopline"
    done = loopline(*command, "--data-dir", str(tmp_path), env={"LOOPLINE_DATABASE_URL": url})
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert 'connection to server at "127.0.0.1", port 9 failed' in done.stderr
    assert "hunter2" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("url", ["garbage", "mysql://u:hunter2@h/x", "postgresql+psycopg://u:hunter2@h:port/x"])
@pytest.mark.parametrize("command", [STORE_COMMANDS[0], STORE_COMMANDS[-1]], ids=" ".join)
def test_a_database_url_that_is_none_is_refused_in_one_line(tmp_path: Path, command: tuple[str, ...], url: str) -> None:
    done = loopline(*command, "--data-dir", str(tmp_path), env={"LOOPLINE_DATABASE_URL": url})
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: database URL must be sqlite:///... or postgresql+psycopg://...")


def test_a_prepared_directory_is_put_into_the_catalogue_under_one_roof(tmp_path: Path, tiny_directory: Path) -> None:
    where = ("--data-dir", str(tmp_path / "data"))
    done = loopline("models", "prepare", f"mine={tiny_directory}", "--catalog", "--engine-url", "http://engine:8000",
                    "--max-model-len", "100", *where)  # fmt: skip
    assert (done.returncode, done.stdout) == (0, f"{tiny_directory}\n"), done.stderr
    listed = json.loads(loopline("models", "list", "--json", *where).stdout)
    assert listed == [
        {
            "name": "mine",
            "path": str(tmp_path / "data" / "models" / "mine"),
            "dtype": "bfloat16",
            "vocab_size": 512,
            "context_length": 64,
            "max_lora_rank": 32,
            "max_loras": 4,
            "engines": ["http://engine:8000"],
        }
    ]
    assert (tmp_path / "data" / "models" / "mine" / "config.json").is_file()


def test_a_model_that_is_none_is_refused(tmp_path: Path) -> None:
    done = loopline("models", "prepare", str(tmp_path), "--data-dir", str(tmp_path / "data"))
    assert done.returncode == 1
    assert "has no config.json: not a model directory" in done.stderr


@pytest.fixture
def tiny_directory(tmp_path: Path) -> Path:
    """What looks like a model to everybody who does not load it."""
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text('{"vocab_size": 512, "max_position_embeddings": 64}')
    (directory / "model.safetensors").touch()
    return directory


def test_version_and_help_name_the_program() -> None:
    assert json.loads(loopline("version", "--json").stdout).keys() == {"version"}
    helped = loopline("--help")
    for command in ("up", "keys", "sessions", "models", "usage", "db", "doctor", "version"):
        assert command in helped.stdout


def test_money_is_printed_exactly() -> None:
    shown = [dollars(nanos) for nanos in (0, 1, 360, 1_500_000_000, 1_234_567_000_000_000, -20_000_000)]
    assert shown == ["$0.00", "$0.000000001", "$0.00000036", "$1.50", "$1,234,567.00", "-$0.02"]


def test_times_are_told_in_one_unit() -> None:
    now = datetime(2026, 1, 2, tzinfo=UTC)
    spans = [timedelta(seconds=5), timedelta(minutes=3), timedelta(hours=5), timedelta(days=9), -timedelta(seconds=1)]
    assert [ago(now - span, now) for span in spans] == ["5 s ago", "3 min ago", "5 h ago", "9 d ago", "0 s ago"]


def test_limits_are_set_listed_and_lifted(where: tuple[str, str]) -> None:
    made = json.loads(loopline("keys", "create", "ci", "--project", "team", "--json", *where).stdout)
    assert loopline("limits", "set", "project", "team", "sessions", "5", *where).returncode == 0
    assert loopline("limits", "set", "key", made["id"], "n", "2", *where).returncode == 0
    listed = json.loads(loopline("limits", "list", "--json", *where).stdout)
    assert listed["defaults"]["sessions"] == 1000
    assert [(one["scope"], one["limit"], one["value"]) for one in listed["own"]] == [
        ("key", "n", 2),
        ("project", "sessions", 5),
    ]
    assert loopline("limits", "remove", "project", "team", "sessions", *where).returncode == 0
    assert loopline("limits", "remove", "project", "team", "sessions", *where).returncode == 1
    assert loopline("limits", "set", "project", "nobody", "n", "2", *where).returncode == 1
