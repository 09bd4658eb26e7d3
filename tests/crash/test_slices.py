"""A slice of every suite, on the real gateway and trainer. The full amounts are ``make`` targets."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.crash.episodes import episode, references_of, run_plan
from tests.crash.launchers import Launcher
from tests.crash.plan import Fault, Strike, Style, draw_plan
from tests.crash.planted import DEFECTS
from tests.crash.processes import Setting
from tests.crash.report import Verdict, show
from tests.crash.suites import acks, kills, pauses
from tests.crash.suites.common import Options
from tests.tiny_model import cached_tiny_model

Suite = Callable[[int, Options, Console], Verdict]


def passes(suite: Suite, amount: int, options: Options) -> Verdict:
    verdict = suite(amount, options, Console(quiet=True))
    show(Console(width=120), verdict)
    assert verdict.violations == []
    return verdict


def value(verdict: Verdict, name: str) -> str:
    return next(line.value for line in verdict.lines if line.name == name)


@pytest.fixture
def options(launcher: Launcher, tmp_path: Path) -> Options:
    return Options(database="sqlite", seed=11, work=tmp_path, launcher=launcher)


@pytest.fixture
def on_postgres(launcher: Launcher, tmp_path: Path) -> Options:
    return Options(database="postgres", seed=12, work=tmp_path, launcher=launcher)


def test_kills_on_sqlite_lose_and_double_nothing(options: Options) -> None:
    verdict = passes(kills.crash, 10, options)
    assert value(verdict, "kill trainer") == "5"


def test_kills_on_postgresql_lose_and_double_nothing(on_postgres: Options) -> None:
    passes(kills.crash, 5, on_postgres)


def test_a_bad_network_changes_no_order_and_doubles_nothing(options: Options) -> None:
    passes(kills.chaos, 120, options)


def test_other_faults_lose_nothing_on_sqlite(options: Options) -> None:
    passes(kills.faults, 9, options)


def test_other_faults_lose_nothing_on_postgresql(on_postgres: Options) -> None:
    passes(kills.faults, 6, on_postgres)


def test_a_worker_that_was_paused_beyond_its_lease_commits_nothing(options: Options) -> None:
    passes(pauses.pauses, 2, options)


def test_a_save_that_was_cut_is_never_listed(options: Options) -> None:
    passes(pauses.saves, 4, options)


def test_every_acknowledgement_on_sqlite_follows_the_sync_of_what_it_needs(options: Options) -> None:
    verdict = passes(acks.acks, 20, options)
    assert value(verdict, "of them with a body file") == "2"


def test_an_acknowledgement_waits_while_syncs_fail(options: Options) -> None:
    verdict = acks.acks(20, options, Console(quiet=True), failing=True)
    assert verdict.violations == []
    assert int(value(verdict, "of them of the database's log")) > 0


def test_every_acknowledgement_on_postgresql_follows_the_sync_of_what_it_needs(on_postgres: Options) -> None:
    passes(acks.acks, 20, on_postgres)


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_fails_the_harness(launcher: Launcher, tmp_path: Path, defect: str) -> None:
    plan = draw_plan(3, operations=16, sessions=1, vocab_size=512, style=Style.FRAIL)  # no load undoes it
    setting = Setting(
        directory=tmp_path / "run",
        database="sqlite",
        model=cached_tiny_model(vocab_size=512),
        vocab_size=512,
        trainer_program="planted",
        environment={"PLANTED": defect},
    )

    _, found = asyncio.run(episode(plan, setting, references_of(plan, setting.model), launcher=launcher))

    assert any("from the reference's" in violation for violation in found), found
    assert any("differ from the uninterrupted run's" in violation for violation in found), found
    wrong_numbers = ("from the reference's", "differ from the uninterrupted run's", "is not the uninterrupted run's")
    assert [violation for violation in found[:-1] if not any(words in violation for words in wrong_numbers)] == []


def test_a_process_that_was_just_killed_is_struck_again_once_it_is_back(launcher: Launcher, tmp_path: Path) -> None:
    plan = draw_plan(4, operations=16, sessions=1, vocab_size=512)
    aimed = (Fault.KILL_GATEWAY, Fault.KILL_GATEWAY, Fault.KILL_ENGINE, Fault.KILL_ALL, Fault.KILL_GATEWAY)
    strikes = tuple(Strike(fault=fault, after=2, delay_s=0.0) for fault in aimed)
    setting = Setting(
        directory=tmp_path / "run", database="sqlite", model=cached_tiny_model(vocab_size=512), vocab_size=512
    )

    run = asyncio.run(run_plan(replace(plan, strikes=strikes), setting, launcher=launcher))

    assert run.violations == []
    assert run.struck == {Fault.KILL_GATEWAY: 3, Fault.KILL_ENGINE: 1, Fault.KILL_ALL: 1}
