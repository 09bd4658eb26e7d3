"""Process groups on Linux: who is in one, and ending all of it.

Every child of the supervisor leads a group (and session) of its own, because an engine's workers outlive its API
server. A process is identified by pid *and* start time, since pids are used again.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence

from gateway.processes import ProcessInfo, process_info

_POLL_S = 0.02


def members(group: int) -> Sequence[ProcessInfo]:
    """Return the live processes of a group."""
    found = (process_info(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())
    return [process for process in found if process is not None and process.group == group]


def executable(pid: int) -> str | None:
    """Return the path of the program that ``pid`` runs; None when it is gone or not ours to see."""
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return None


def signal_group(group: int, number: signal.Signals) -> None:
    """Send a signal to every member; an empty group is fine.

    Raises:
        ValueError: ``group`` cannot be a child's. ``killpg(0)`` would hit the caller's own group.
    """
    if group <= 1:
        raise ValueError(f"{group} is no process group of a child")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


async def end_group(
    group: int,
    *,
    grace_s: float,
    hurry: asyncio.Event | None = None,
    leader_gone: Callable[[], bool] = lambda: True,
) -> None:
    """End a group: SIGTERM, up to ``grace_s`` seconds (or until ``hurry``), then SIGKILL; returns when it is empty.

    With ``grace_s`` 0 it is killed at once. ``leader_gone`` says whether the caller has reaped the group's leader.
    """
    if grace_s > 0:
        signal_group(group, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and not (hurry is not None and hurry.is_set()):
            if not members(group) and leader_gone():
                return
            await asyncio.sleep(_POLL_S)
    while members(group) or not leader_gone():
        signal_group(group, signal.SIGKILL)
        await asyncio.sleep(_POLL_S)
