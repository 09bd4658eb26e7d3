"""Small real programs for the supervisor to run, and looks at what runs."""

import asyncio
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

from gateway.supervisor.children import ChildSpec

# Says it is ready by making a file, then waits for SIGTERM.
SERVE = """
    import pathlib, signal, sys
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    pathlib.Path(sys.argv[1]).write_text("ready")
    print("serving", flush=True)
    while not stopped:
        signal.pause()
    print("drained", flush=True)
"""
# The same with a worker in its group that ignores SIGTERM, as an engine's workers do for seconds.
SERVE_WITH_WORKER = """
    import pathlib, signal, subprocess, sys
    worker = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); signal.pause()"
    child = subprocess.Popen([sys.executable, "-c", worker], stdout=subprocess.PIPE)
    child.stdout.readline()
    pathlib.Path(sys.argv[1]).write_text(str(child.pid))
    signal.pause()
"""
# Ignores SIGTERM altogether.
DEAF = """
    import pathlib, signal, sys
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pathlib.Path(sys.argv[1]).write_text("ready")
    while True:
        signal.pause()
"""
# Dies at once, saying why.
BROKEN = """
    import sys
    sys.exit("no such model: moon-cheese")
"""


def program(name: str, source: str, directory: Path, *, stop_grace_s: float = 10.0) -> ChildSpec:
    """Return a spec that runs ``source``; it is ready once the file ``NAME.ready`` exists."""
    ready = directory / f"{name}.ready"

    async def probe() -> bool:
        return ready.exists()

    return ChildSpec(
        name=name,
        command=[sys.executable, "-c", textwrap.dedent(source), str(ready)],
        environment={"PATH": "/usr/bin:/bin"},
        log=directory / "logs" / f"{name}.log",
        probe=probe,
        stop_grace_s=stop_grace_s,
    )


async def until(condition: Callable[[], object], *, timeout_s: float = 20.0) -> None:
    """Return once ``condition`` holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)
