"""Processes of this machine, told apart for good: a pid is used again, a pid with its start time is not.

A leaf, like ``places``: gateway, trainer and supervisor sign what they own with ``own_name`` and can tell whether the
process behind another name is gone, without waiting for a lease to run out.
"""

import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"(?P<machine>[0-9a-f-]+\.[0-9]+)\.(?P<pid>[0-9]+)\.(?P<ticks>[0-9]+)\.[0-9a-f]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """One live process. ``start_ticks`` counts clock ticks since boot."""

    pid: int
    group: int
    start_ticks: int


def boot_id() -> str:
    """Return the kernel's id of this boot: start times of different boots do not compare."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def process_info(pid: int) -> ProcessInfo | None:
    """Return what is known of ``pid``; None when there is no such process or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name stands in parentheses and may itself hold spaces and parentheses.
    fields = stat[stat.rindex(")") + 2 :].split()
    if fields[0] in "ZX":
        return None
    return ProcessInfo(pid=pid, group=int(fields[2]), start_ticks=int(fields[19]))


def own_name() -> str:
    """Return a name for what this process owns in the database; every call gives another one."""
    own = process_info(os.getpid())
    ticks = own.start_ticks if own is not None else 0
    return f"{_machine()}.{os.getpid()}.{ticks}.{secrets.token_hex(4)}"


def is_gone(name: str) -> bool:
    """Say whether the process that called itself ``name`` has certainly ended.

    False for one on another machine, of another boot or in another container: nothing is known about it.
    """
    read = _NAME.fullmatch(name)
    if read is None or read["machine"] != _machine():
        return False
    process = process_info(int(read["pid"]))
    return process is None or process.start_ticks != int(read["ticks"])


def _machine() -> str:
    """The boot and the pid namespace: inside both, pids mean the same."""
    return f"{boot_id()}.{os.stat('/proc/self/ns/pid').st_ino}"
