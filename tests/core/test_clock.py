"""The clock of every process: neither forwards nor backwards jumps of the machine's clock are felt."""

from datetime import UTC, datetime, timedelta

import pytest

from gateway.core.clock import SystemClock

START = datetime(2026, 1, 2, tzinfo=UTC)


class Machine:
    """A machine whose clock can be set."""

    def __init__(self) -> None:
        self.passed_s = 0.0
        self.wall = START

    def pass_(self, seconds: float) -> None:
        self.passed_s += seconds
        self.wall += timedelta(seconds=seconds)

    def clock(self) -> SystemClock:
        return SystemClock(lambda: self.wall, lambda: self.passed_s)


@pytest.mark.parametrize("hours", [1, -1])
def test_a_jump_of_the_machines_clock_is_not_felt(hours: int) -> None:
    machine = Machine()
    clock = machine.clock()
    machine.pass_(10)
    before = clock.now()
    machine.wall += timedelta(hours=hours)
    at_once = clock.now()
    machine.pass_(10)

    assert (before, at_once) == (START + timedelta(seconds=10), before)
    assert abs(clock.now() - (before + timedelta(seconds=10))) <= timedelta(seconds=0.05)


def test_a_small_error_is_followed_and_time_never_goes_back() -> None:
    machine = Machine()
    clock = machine.clock()
    machine.wall -= timedelta(seconds=1)
    times: list[datetime] = []
    for _ in range(400):
        machine.pass_(1)
        times.append(clock.now())

    assert times == sorted(set(times))
    assert times[-1] == machine.wall


def test_all_processes_show_the_databases_time() -> None:
    machine = Machine()
    clock = machine.clock()
    clock.set(START + timedelta(minutes=5))
    machine.pass_(60)

    assert clock.now() == START + timedelta(minutes=6)
