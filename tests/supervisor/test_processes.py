"""Names of processes: unique, and known to be gone only when that is certain."""

import subprocess
import sys

from gateway.processes import is_gone, own_name

NAME = "from gateway.processes import own_name; print(own_name(), flush=True); input()"


def test_a_process_is_alive_until_it_is_killed_and_then_gone() -> None:
    command = [sys.executable, "-c", NAME]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        gone_while_it_runs = is_gone(name)
        process.kill()

    assert (gone_while_it_runs, is_gone(name)) == (False, True)


def test_names_differ_within_a_process() -> None:
    assert own_name() != own_name()


def test_a_pid_that_was_given_to_another_process_does_not_keep_the_first_one_alive() -> None:
    machine, pid, ticks, token = own_name().rsplit(".", 3)

    assert not is_gone(".".join((machine, pid, ticks, token)))
    assert is_gone(".".join((machine, pid, str(int(ticks) + 1), token)))


def test_nothing_is_known_of_processes_elsewhere() -> None:
    _, pid, ticks, token = own_name().rsplit(".", 3)
    other_boot = f"00000000-0000-0000-0000-000000000000.1.{pid}.{ticks}.{token}"

    assert not is_gone(other_boot)
    assert not is_gone("host-123-abcdef01")
    assert not is_gone("")
