"""Each invariant sees its violation: a finished run is damaged in one place, and the oracle must say so."""

import asyncio
import shutil
import sqlite3
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.crash.episodes import PROBE_TOLERANCE, references_of, run_plan
from tests.crash.history import Call, Event, History, Kind
from tests.crash.launchers import Launcher
from tests.crash.oracles import counters, sql
from tests.crash.oracles.equality import sample_distance
from tests.crash.plan import Plan, draw_plan
from tests.crash.processes import Setting
from tests.tiny_model import cached_tiny_model

LAST = "AND status = 'completed' ORDER BY session_id, seq DESC LIMIT 1"
STEP = f"(SELECT id FROM operations WHERE kind = 'optim_step' {LAST})"
PASS = f"(SELECT id FROM operations WHERE kind = 'forward_backward' {LAST})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A run without faults, and its files."""

    plan: Plan
    history: History
    data_dir: Path
    journal: Path

    @property
    def url(self) -> str:
        return f"sqlite:///{self.data_dir / 'loopline.db'}"

    def violations(self) -> list[str]:
        found = sql.violations(self.url, self.plan, self.history, self.data_dir / "artifacts")
        with sql.connected(self.url) as connection:
            return found + counters.violations(connection, self.history, self.journal, exact=True)

    def damage(self, statement: str) -> None:
        with sqlite3.connect(self.data_dir / "loopline.db") as connection:
            triggers = connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall()
            for (name,) in triggers:  # they refuse to change the past
                connection.execute(f"DROP TRIGGER {name}")
            assert connection.execute(statement).rowcount > 0, statement


@pytest.fixture(scope="module")
def pristine(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    plan = draw_plan(5, operations=45, sessions=2, vocab_size=512)
    setting = Setting(
        directory=tmp_path_factory.mktemp("oracles") / "run",
        database="sqlite",
        model=cached_tiny_model(vocab_size=512),
        vocab_size=512,
    )
    run = asyncio.run(run_plan(plan, setting, launcher=launcher))
    assert run.violations == []
    directory = setting.directory
    return Finished(plan=plan, history=run.history, data_dir=directory / "data", journal=directory / "engine.journal")


@pytest.fixture
def finished(pristine: Finished, tmp_path: Path) -> Finished:
    """A copy to damage."""
    shutil.copytree(pristine.data_dir, tmp_path / "data")
    shutil.copy(pristine.journal, tmp_path / "journal")
    return Finished(
        plan=pristine.plan,
        history=History(events=list(pristine.history.events)),
        data_dir=tmp_path / "data",
        journal=tmp_path / "journal",
    )


def test_a_clean_run_has_no_violation(finished: Finished) -> None:
    assert finished.violations() == []


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (f"DELETE FROM operations WHERE id = {STEP}", "and lost"),
        (f"UPDATE operations SET seq = seq + 1000 WHERE id = {STEP}", "which has seq"),
        (f"UPDATE operations SET kind = 'load_state' WHERE id = {STEP}", "was submitted as optim_step"),
        (f"UPDATE operations SET status = 'failed' WHERE id = {PASS}", "is failed, must be completed"),
        (f"UPDATE operations SET started_at = started_at - 10000000 WHERE id = {PASS}", "started before"),
        (f"UPDATE usage_facts SET quantity = 2 * quantity WHERE source = {PASS}", "billed"),
        (f"DELETE FROM usage_facts WHERE source = {PASS}", "billed {} for"),
        ("INSERT INTO usage_facts (source, meter, quantity, project_id, key_id, base_model, at)"
         f" SELECT {STEP}, meter, 1, project_id, key_id, base_model, at FROM usage_facts"
         f" WHERE source = {PASS}", "billed {'train': 1} for 0 tokens"),
        ("UPDATE usage_facts SET quantity = quantity + 1 WHERE source LIKE 'smp-%'", "told"),
        ("DELETE FROM versions WHERE number = 1", "has 0 versions"),
        ("UPDATE versions SET seq = seq + 1 WHERE number = 1", "was saved at"),
        ("UPDATE versions SET manifest_sha256 = '" + "0" * 64 + "' WHERE number = 1", "not the recorded one"),
        ("UPDATE sessions SET applied_seq = applied_seq - 1", "applied_seq"),
        ("UPDATE sessions SET status = 'stopped'", "the session is stopped"),
    ],
)  # fmt: skip
def test_a_damaged_database_is_found_out(finished: Finished, statement: str, said: str) -> None:
    finished.damage(statement)

    assert any(said in violation for violation in finished.violations()), finished.violations()


def test_a_changed_a_missing_and_a_surplus_file_are_found_out(finished: Finished) -> None:
    artifacts = finished.data_dir / "artifacts"
    first, second, third = sorted(artifacts.glob("ver-*/*.safetensors"))[:3]
    first.write_bytes(b"x" + first.read_bytes()[1:])
    second.unlink()
    (third.parent / "more").touch()

    found = finished.violations()

    assert any("not what was hashed" in violation for violation in found)
    assert sum(", lists [" in violation for violation in found) == 2


def test_an_answer_that_nobody_billed_and_a_bill_without_computation_are_found_out(finished: Finished) -> None:
    answer = next(iter(finished.history.samples().values()))
    finished.history.add(
        Event(at=0.0, kind=Kind.OK, call=Call.SAMPLE, subject="free", value={**answer, "id": "smp-free"})
    )
    finished.journal.write_text("\n".join(finished.journal.read_text().splitlines()[1:]))

    found = finished.violations()

    assert any("smp-free: billed None" in violation for violation in found)
    assert any("times more than computed" in violation for violation in found)


def test_a_sample_of_other_weights_is_found_out() -> None:
    plan = draw_plan(5, operations=45, sessions=2, vocab_size=512)
    references = references_of(plan, cached_tiny_model(vocab_size=512))
    history, tuned = History(), ""
    for session in plan.sessions:
        for sample in session.samples:
            tokens = [7, 8, 9]
            honest = references[session.name].logprobs(sample.after, sample.body["prompt"], tokens)
            of_base = references[session.name].logprobs(0, sample.body["prompt"], tokens)
            logprobs = honest if tuned else of_base
            tuned = tuned or (sample.key if sample.after else "")
            answer = {"sequences": [{"tokens": tokens, "logprobs": logprobs}]}
            history.add(Event(at=0.0, kind=Kind.OK, call=Call.SAMPLE, subject=sample.key, value=answer))

    distances = sample_distance(plan, history, references)

    assert tuned
    assert {key for key, distance in distances.items() if distance > PROBE_TOLERANCE} == {tuned}
