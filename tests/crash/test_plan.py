import dataclasses
import random
from collections import Counter

import pytest

from tests.crash.plan import KILLS, Dialect, Fault, Plan, Step, Style, draw_plan, draw_strikes


def plan_of(seed: int, style: Style = Style.MIXED) -> Plan:
    return draw_plan(seed, operations=240, sessions=4, strikes=20, vocab_size=512, style=style)


def steps_of(plan: Plan) -> list[Step]:
    return [step for session in plan.sessions for step in session.steps]


def test_a_seed_is_a_plan() -> None:
    assert dataclasses.asdict(plan_of(7)) == dataclasses.asdict(plan_of(7))
    assert dataclasses.asdict(plan_of(7)) != dataclasses.asdict(plan_of(8))


@pytest.mark.parametrize("style", list(Style))
def test_seqs_have_no_gap_and_a_load_comes_after_the_save_it_needs(style: Style) -> None:
    for session in plan_of(3, style).sessions:
        first = session.dialect.first_seq
        assert [step.seq for step in session.steps] == list(range(first, first + len(session.steps)))
        saves = [step.seq for step in session.steps if step.verb.startswith("save_")]
        for step in session.steps:
            if step.verb == "load_state":
                assert step.needs == saves[int(step.body["version"].rpartition("@")[2]) - 1] < step.seq


def test_four_sessions_speak_every_dialect() -> None:
    assert {session.dialect for session in plan_of(3).sessions} == set(Dialect)


def test_every_kind_of_operation_and_failure_occurs() -> None:
    steps = [step for seed in range(8) for step in steps_of(plan_of(seed))]
    assert {step.verb for step in steps} == {
        "forward",
        "forward_backward",
        "optim_step",
        "save_weights",
        "save_state",
        "load_state",
    }
    assert {step.failure for step in steps} == {None, "non_finite_loss", "incomplete_window", "empty_window"}


def test_a_step_that_must_complete_has_a_whole_window_before_it() -> None:
    for seed in range(8):
        for session in plan_of(seed).sessions:
            window, broken = 0, False
            for step in session.steps:
                if step.verb == "forward_backward":
                    window, broken = window + (step.failure is None), broken or step.failure is not None
                if step.verb == "optim_step":
                    expected = "incomplete_window" if broken else None if window else "empty_window"
                    assert step.failure == expected, step.seq
                if step.verb in ("optim_step", "load_state"):
                    window, broken = 0, False


def test_two_hundred_kills_are_one_hundred_of_the_trainer_and_sixty_of_the_gateway() -> None:
    pack = [fault for fault, count in KILLS.items() for _ in range(count)]

    strikes = draw_strikes(random.Random(1), pack, 200, 2400)

    assert Counter(strike.fault for strike in strikes) == {
        Fault.KILL_TRAINER: 100,
        Fault.KILL_GATEWAY: 60,
        Fault.KILL_ENGINE: 20,
        Fault.KILL_ALL: 20,
    }
    assert [strike.after for strike in strikes] == sorted(strike.after for strike in strikes)
