"""What a process's clock shows after its start: what the other processes of the machine show."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gateway.core.clock import SystemClock
from gateway.store import SqlDatabase, open_database
from gateway.store.clocks import KEPT_S, leave, this_machine

HOUR = timedelta(hours=1)
SECOND = timedelta(seconds=1)


class Machine:
    """A machine whose uptime passes as told; its clock and the database's show the real time."""

    def __init__(self) -> None:
        self.uptime = 1000.0

    def clock(self) -> SystemClock:
        return SystemClock(monotonic=lambda: self.uptime)


@pytest.fixture
def machine() -> Machine:
    return Machine()


async def set_back(database: SqlDatabase, clock: SystemClock, by: timedelta) -> None:
    """Let ``clock`` be one that has run since before the machine's and the database's were set forward by ``by``."""
    clock.go_on(clock.now() - by, clock.uptime)
    name = this_machine()
    assert name is not None
    await leave(database, clock, name)


@pytest.mark.parametrize("by", [HOUR, -HOUR], ids=["forward", "back"])
@pytest.mark.parametrize("later_s", [0, 300])
async def test_one_that_starts_after_a_clock_was_set_shows_what_the_running_ones_show(
    machine: Machine, url: str, tmp_path: Path, by: timedelta, later_s: float
) -> None:
    running = machine.clock()
    async with open_database(url, blob_dir=tmp_path, clock=running) as database:
        await set_back(database, running, by)
        machine.uptime += later_s
        starting = machine.clock()
        async with open_database(url, blob_dir=tmp_path, clock=starting):
            assert abs(starting.now() - running.now()) < SECOND
            machine.uptime += 60
            assert abs(starting.now() - running.now()) < SECOND


async def test_what_was_left_long_ago_counts_no_more(machine: Machine, url: str, tmp_path: Path) -> None:
    running = machine.clock()
    async with open_database(url, blob_dir=tmp_path, clock=running) as database:
        await set_back(database, running, HOUR)
    machine.uptime += KEPT_S + 1
    starting = machine.clock()
    async with open_database(url, blob_dir=tmp_path, clock=starting):
        assert abs(starting.now() - datetime.now(UTC)) < 10 * SECOND


async def test_what_was_left_before_the_machine_started_anew_counts_no_more(
    machine: Machine, url: str, tmp_path: Path
) -> None:
    running = machine.clock()
    async with open_database(url, blob_dir=tmp_path, clock=running) as database:
        await set_back(database, running, HOUR)
    machine.uptime = 5.0
    starting = machine.clock()
    async with open_database(url, blob_dir=tmp_path, clock=starting):
        assert abs(starting.now() - datetime.now(UTC)) < 10 * SECOND


async def test_a_clock_that_cannot_be_left_stops_neither_a_start_nor_an_end(
    machine: Machine, url: str, tmp_path: Path
) -> None:
    clock = machine.clock()
    async with open_database(url, blob_dir=tmp_path, clock=machine.clock()) as database:
        await database.change(lambda connection: connection.exec_driver_sql("ALTER TABLE clocks RENAME TO kept"))
        name = this_machine()
        assert name is not None
        try:
            await leave(database, clock, name)
        finally:
            await database.change(lambda connection: connection.exec_driver_sql("ALTER TABLE kept RENAME TO clocks"))
        async with open_database(url, blob_dir=tmp_path, clock=clock):
            assert abs(clock.now() - datetime.now(UTC)) < 10 * SECOND
