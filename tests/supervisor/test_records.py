"""The run directory: one supervisor at a time, and nothing of a crashed one survives the next start."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.processes import boot_id
from gateway.supervisor import groups
from gateway.supervisor.records import Address, AlreadyRunning, RunDir, sweep
from tests.supervisor.children import SERVE, SERVE_WITH_WORKER, until


@pytest.fixture
def leaders() -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Processes to end with their groups when the test is over."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        groups.signal_group(process.pid, signal.SIGKILL)
        process.wait()


def lead(leaders: list["subprocess.Popen[bytes]"], source: str, ready: Path) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(source), str(ready)], start_new_session=True)
    leaders.append(process)
    return process


def test_a_second_supervisor_on_the_same_data_dir_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    with (
        RunDir(tmp_path).lock(),
        pytest.raises(AlreadyRunning, match=rf"process {os.getpid()}\)") as caught,
        RunDir(tmp_path).lock(),
    ):
        pass
    assert "--data-dir" in str(caught.value)
    with RunDir(tmp_path).lock():
        pass


async def test_an_orphan_is_ended_with_its_whole_group(
    tmp_path: Path, leaders: list["subprocess.Popen[bytes]"]
) -> None:
    run_dir = RunDir(tmp_path)
    orphan = lead(leaders, SERVE, tmp_path / "ready")
    await until((tmp_path / "ready").exists)
    run_dir.write_child("trainer", orphan.pid)

    swept = await sweep(run_dir, grace_s=5.0)

    assert [(record.name, record.pid) for record in swept] == [("trainer", orphan.pid)]
    assert groups.members(orphan.pid) == []
    assert run_dir.children() == []


async def test_workers_whose_leader_is_dead_are_ended_too(
    tmp_path: Path, leaders: list["subprocess.Popen[bytes]"]
) -> None:
    run_dir = RunDir(tmp_path)
    orphan = lead(leaders, SERVE_WITH_WORKER, tmp_path / "ready")
    await until(lambda: (tmp_path / "ready").exists() and (tmp_path / "ready").read_text())
    run_dir.write_child("engine", orphan.pid)
    worker = int((tmp_path / "ready").read_text())
    orphan.kill()
    orphan.wait()
    assert groups.process_info(worker) is not None

    swept = await sweep(run_dir, grace_s=0.1)

    assert [record.name for record in swept] == ["engine"]
    assert groups.process_info(worker) is None


async def test_a_stranger_that_took_over_the_number_is_left_alone(
    tmp_path: Path, leaders: list["subprocess.Popen[bytes]"]
) -> None:
    run_dir = RunDir(tmp_path)
    stranger = lead(leaders, SERVE, tmp_path / "ready")
    await until((tmp_path / "ready").exists)
    run_dir.write_child("trainer", stranger.pid)
    record = tmp_path / "run" / "trainer.child.json"
    started = groups.process_info(stranger.pid).start_ticks
    record.write_text(record.read_text().replace(f'"start_ticks": {started}', f'"start_ticks": {started - 1}'))

    assert await sweep(run_dir, grace_s=0.0) == []
    assert groups.process_info(stranger.pid) is not None
    assert run_dir.children() == []


async def test_a_record_of_another_boot_or_a_torn_one_ends_nothing(
    tmp_path: Path, leaders: list["subprocess.Popen[bytes]"]
) -> None:
    run_dir = RunDir(tmp_path)
    process = lead(leaders, SERVE, tmp_path / "ready")
    await until((tmp_path / "ready").exists)
    run_dir.write_child("trainer", process.pid)
    record = tmp_path / "run" / "trainer.child.json"
    record.write_text(record.read_text().replace(boot_id(), "another-boot"))
    (tmp_path / "run" / "engine.child.json").write_text('{"name": "eng')

    assert await sweep(run_dir, grace_s=0.0) == []
    assert groups.process_info(process.pid) is not None


def test_the_address_is_readable_until_it_is_removed(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    address = Address(url="http://127.0.0.1:8000", pid=os.getpid())
    run_dir.write_address(address)
    assert RunDir(tmp_path).address() == address
    run_dir.remove_address()
    assert run_dir.address() is None


def test_the_address_of_a_supervisor_that_was_killed_does_not_count(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    run_dir.write_address(Address(url="http://127.0.0.1:8000", pid=gone.pid))
    assert run_dir.address() is None
