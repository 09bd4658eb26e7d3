"""The supervisor on small real programs: start, restart, giving up, stopping, and what is left afterwards: nothing."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.supervisor import groups
from gateway.supervisor.children import Child, ChildGaveUp, ChildSpec, RestartPolicy, State, describe_exit
from gateway.supervisor.logfiles import tail
from gateway.supervisor.records import RunDir
from gateway.supervisor.supervisor import Supervisor
from tests.supervisor.children import BROKEN, DEAF, SERVE, SERVE_WITH_WORKER, program, until

QUICK = RestartPolicy(first_delay_s=0.01, max_delay_s=0.05, stable_after_s=60.0, give_up_after=3)


@contextlib.asynccontextmanager
async def running(supervisor: Supervisor) -> AsyncIterator["asyncio.Task[None]"]:
    task = asyncio.create_task(supervisor.run())
    try:
        yield task
    finally:
        supervisor.stop()
        await asyncio.wait({task})


def make(tmp_path: Path, *specs: ChildSpec, policy: RestartPolicy = QUICK, log: list[str] | None = None) -> Supervisor:
    def note(child: Child) -> None:
        if log is not None:
            log.append(f"{child.spec.name} {child.state}")

    return Supervisor(specs, run_dir=RunDir(tmp_path), policy=policy, on_change=note)


async def test_children_start_report_ready_and_stop_in_the_opposite_order(tmp_path: Path) -> None:
    log: list[str] = []
    supervisor = make(tmp_path, program("engine", SERVE, tmp_path), program("gateway", SERVE, tmp_path), log=log)
    async with running(supervisor) as task:
        await asyncio.wait_for(supervisor.ready(), 20)
        pids = [child.pid for child in supervisor.children]
        assert [groups.process_info(pid).group for pid in pids] == pids
        supervisor.stop()
        await asyncio.wait_for(task, 20)

    assert [line for line in log if line.endswith(("stopping", "stopped"))] == [
        "gateway stopping",
        "gateway stopped",
        "engine stopping",
        "engine stopped",
    ]
    assert tail(tmp_path / "logs" / "engine.log") == ["serving", "drained"]
    assert [groups.members(pid) for pid in pids] == [[], []]
    assert RunDir(tmp_path).children() == []


async def test_a_killed_child_is_started_again_and_its_workers_die_first(tmp_path: Path) -> None:
    log: list[str] = []
    supervisor = make(tmp_path, program("engine", SERVE_WITH_WORKER, tmp_path), log=log)
    async with running(supervisor):
        await asyncio.wait_for(supervisor.ready(), 20)
        child = supervisor.children[0]
        first = child.pid
        worker = int((tmp_path / "engine.ready").read_text())
        (tmp_path / "engine.ready").unlink()

        os.kill(first, signal.SIGKILL)
        await until(lambda: child.state is State.READY and child.pid != first)

        assert groups.process_info(worker) is None
        assert groups.members(first) == []
        assert child.starts == 2
    assert log == ["engine starting", "engine ready", "engine restarting", "engine starting", "engine ready",
                   "engine stopping", "engine stopped"]  # fmt: skip


async def test_a_child_that_keeps_dying_ends_everything_and_its_log_says_why(tmp_path: Path) -> None:
    supervisor = make(tmp_path, program("gateway", SERVE, tmp_path), program("engine", BROKEN, tmp_path))
    with pytest.raises(ChildGaveUp, match=r"engine exited with status 1, 3 times in a row: giving up") as caught:
        await asyncio.wait_for(supervisor.run(), 30)

    assert tail(caught.value.spec.log) == ["no such model: moon-cheese"] * 3
    assert [child.state for child in supervisor.children] == [State.STOPPED, State.STOPPED]
    assert [child.pid for child in supervisor.children] == [None, None]


async def test_a_child_that_was_ready_before_is_never_given_up(tmp_path: Path) -> None:
    supervisor = make(tmp_path, program("trainer", SERVE, tmp_path))
    async with running(supervisor) as task:
        child = supervisor.children[0]
        for life in range(1, 6):  # give_up_after is 3, and none of these lives is a stable one
            await until(lambda life=life: child.state is State.READY and child.starts == life)
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
        await until(lambda: child.starts == 6)
        assert not task.done()


async def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    supervisor = make(tmp_path, program("engine", SERVE_WITH_WORKER, tmp_path, stop_grace_s=0.2))
    async with running(supervisor) as task:
        await asyncio.wait_for(supervisor.ready(), 20)
        leader = supervisor.children[0].pid
        supervisor.stop()
        await asyncio.wait_for(task, 10)
    assert groups.members(leader) == []


async def test_a_second_stop_does_not_wait_for_the_grace_period(tmp_path: Path) -> None:
    supervisor = make(tmp_path, program("trainer", DEAF, tmp_path, stop_grace_s=600.0))
    async with running(supervisor) as task:
        await asyncio.wait_for(supervisor.ready(), 20)
        leader = supervisor.children[0].pid
        supervisor.stop()
        await until(lambda: supervisor.children[0].state is State.STOPPING)
        supervisor.stop()
        await asyncio.wait_for(task, 10)
    assert groups.members(leader) == []


async def test_a_stop_during_the_pause_before_a_restart_does_not_wait_for_it(tmp_path: Path) -> None:
    slow = RestartPolicy(first_delay_s=600.0, max_delay_s=600.0, give_up_after=9)
    supervisor = make(tmp_path, program("engine", BROKEN, tmp_path), policy=slow)
    async with running(supervisor) as task:
        await until(lambda: supervisor.children[0].state is State.RESTARTING)
        assert supervisor.children[0].note == "exited with status 1; starting again in 600 s"
        supervisor.stop()
        await asyncio.wait_for(task, 10)
    assert supervisor.children[0].starts == 1


def test_pauses_double_up_to_the_limit() -> None:
    policy = RestartPolicy(first_delay_s=0.5, max_delay_s=15.0)
    assert [policy.delay_s(deaths) for deaths in (1, 2, 3, 6, 50)] == [0.5, 1.0, 2.0, 15.0, 15.0]


def test_ends_are_described_in_words() -> None:
    assert describe_exit(3) == "exited with status 3"
    assert describe_exit(-9) == "was ended by SIGKILL"
