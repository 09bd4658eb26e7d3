"""Making system calls of running processes fail for a moment: strace attaches, injects an errno and lets go."""

import asyncio
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

PATIENCE_S = 15.0
_POLL_S = 0.005


async def fail_calls(
    pids: Sequence[int], calls: str, errno: str, *, seconds: float, trace: Path, only: Sequence[Path] = ()
) -> int:
    """Let ``calls`` of these processes, and of those they start, fail with ``errno``; return how many did.

    Args:
        calls: names of system calls, separated by commas.
        seconds: how long; longer, up to ``PATIENCE_S``, when none was made by then.
        only: files to which the calls must be (none: any).

    Raises:
        RuntimeError: strace could not attach.
    """
    command = ["strace", "-f", "-qq", "-o", str(trace)]
    for pid in pids:
        command += ["-p", str(pid)]
    for path in only:
        command += ["-P", str(path)]
    command += ["-e", f"trace={calls}", "-e", f"inject={calls}:error={errno}"]
    tracer = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    while not any(_is_traced(pid) for pid in pids):
        if tracer.returncode is not None:
            _, complaint = await tracer.communicate()
            raise RuntimeError(f"strace: {complaint.decode(errors='replace')}")
        await asyncio.sleep(_POLL_S)
    began = time.monotonic()
    while tracer.returncode is None:  # it ends by itself when those that it traces do
        lasted = time.monotonic() - began
        if lasted > PATIENCE_S or (lasted > seconds and _failed(trace)):
            break
        await asyncio.sleep(_POLL_S)
    with suppress(ProcessLookupError):
        tracer.send_signal(signal.SIGINT)
    await tracer.communicate()
    return _failed(trace)


def family(pid: int) -> Sequence[int]:
    """Return a process and its children."""
    with suppress(OSError):
        return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    return [pid]


def _failed(trace: Path) -> int:
    return trace.read_text(errors="replace").count("(INJECTED)")


def _is_traced(pid: int) -> bool:
    with suppress(OSError):
        return "TracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text()
    return False
