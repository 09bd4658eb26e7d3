"""One supervised child: what it is, how it is started, watched, restarted and stopped."""

import asyncio
import contextlib
import enum
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gateway.supervisor import groups
from gateway.supervisor.logfiles import open_log
from gateway.supervisor.probes import Probe
from gateway.supervisor.records import RunDir

_PROBE_EVERY_S = 0.2


class State(enum.StrEnum):
    """Where a child is in its life."""

    WAITING = "waiting"  # not started yet
    STARTING = "starting"  # runs, does not answer yet
    READY = "ready"  # answered its probe
    RESTARTING = "restarting"  # died; will be started again
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What to run. ``stop_grace_s`` is how long it may take to end after SIGTERM."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    probe: Probe
    stop_grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """When a dead child is started again: after ``first_delay_s``, doubling up to ``max_delay_s``.

    A child that had been ready for ``stable_after_s`` starts afresh at the first delay. ``give_up_after`` deaths of one
    that has never been ready are the end of everything: it cannot start here. One that was ready before is started
    again for ever: whatever kills it (an operation, the kernel short of memory) must not end everybody's work.
    """

    first_delay_s: float = 0.5
    max_delay_s: float = 20.0
    stable_after_s: float = 30.0
    give_up_after: int = 3

    def delay_s(self, deaths: int) -> float:
        """Return the pause after the ``deaths``-th death in a row (1 is the first)."""
        return min(self.max_delay_s, self.first_delay_s * 2.0 ** (deaths - 1))


class ChildGaveUp(Exception):
    """A child died too often in a row; everything is stopped."""

    def __init__(self, spec: ChildSpec, deaths: int, how: str) -> None:
        self.spec = spec
        super().__init__(f"{spec.name} {how}, {deaths} times in a row: giving up")


@dataclass(slots=True, kw_only=True)
class Child:
    """A spec and what became of it. ``deaths`` counts those in a row, ``starts`` all starts."""

    spec: ChildSpec
    state: State = State.WAITING
    note: str = ""
    pid: int | None = None
    starts: int = 0
    deaths: int = 0
    was_ready: bool = False
    ready: asyncio.Event = field(default_factory=asyncio.Event)


class Keeper:
    """Keeps one child running until it is told to stop."""

    def __init__(
        self, child: Child, *, run_dir: RunDir, policy: RestartPolicy, on_change: Callable[[Child], None]
    ) -> None:
        self.child = child
        self._run_dir = run_dir
        self._policy = policy
        self._on_change = on_change
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    def stop(self, *, hurry: bool = False) -> None:
        """Ask for the end, with ``hurry`` without waiting for a clean one; ``run`` returns when the group is empty."""
        self._stop.set()
        if hurry:
            self._hurry.set()

    async def run(self) -> None:
        """Start the child, and again whenever it dies, until ``stop``.

        Raises:
            ChildGaveUp: too many deaths in a row; its group has been ended.
        """
        while not self._stop.is_set():
            how, ready_for_s = await self._live()
            if not self._stop.is_set():
                await self._mourn(how, ready_for_s)
        self._enter(State.STOPPED)

    async def _live(self) -> tuple[str, float]:
        """Run the child once, to its end. Return how it ended and how long it had been ready."""
        spec, loop = self.child.spec, asyncio.get_running_loop()
        process = await self._start()
        exited = asyncio.create_task(process.wait())
        ready_at = await self._until_exit_or_stop(exited)
        ready_for_s = loop.time() - ready_at if ready_at is not None else 0.0
        # A dead leader's workers cannot be drained: they are killed before they meet their successors.
        grace_s = 0.0 if exited.done() else spec.stop_grace_s
        if not exited.done():
            self._enter(State.STOPPING)
        await groups.end_group(process.pid, grace_s=grace_s, hurry=self._hurry, leader_gone=exited.done)
        self._run_dir.remove_child(spec.name)
        self.child.pid = None
        return describe_exit(exited.result()), ready_for_s

    async def _mourn(self, how: str, ready_for_s: float) -> None:
        """Count a death and wait until the next start is due.

        Raises:
            ChildGaveUp: it was one too many.
        """
        child = self.child
        child.deaths = 1 if ready_for_s >= self._policy.stable_after_s else child.deaths + 1
        if not child.was_ready and child.deaths >= self._policy.give_up_after:
            self._enter(State.STOPPED, how)
            raise ChildGaveUp(child.spec, child.deaths, how)
        delay_s = self._policy.delay_s(child.deaths)
        self._enter(State.RESTARTING, f"{how}; starting again in {delay_s:g} s")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._stop.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        spec = self.child.spec
        with open_log(spec.log) as log:
            process = await asyncio.create_subprocess_exec(
                *spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(spec.environment),
                start_new_session=True,
            )
        self._run_dir.write_child(spec.name, process.pid)
        self.child.pid = process.pid
        self.child.starts += 1
        self._enter(State.STARTING)
        return process

    async def _until_exit_or_stop(self, exited: asyncio.Task[int]) -> float | None:
        """Return once the child has exited or a stop is wanted; the value is when it became ready, if it did."""
        ready_at: float | None = None
        stop = asyncio.create_task(self._stop.wait())
        while not exited.done() and not stop.done():
            if ready_at is None and await self.child.spec.probe() and not exited.done():
                ready_at = asyncio.get_running_loop().time()
                self._enter(State.READY)
            pause_s = _PROBE_EVERY_S if ready_at is None else None
            await asyncio.wait({exited, stop}, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        return ready_at

    def _enter(self, state: State, note: str = "") -> None:
        self.child.state, self.child.note = state, note
        if state is State.READY:
            self.child.was_ready = True
            self.child.ready.set()
        else:
            self.child.ready.clear()
        self._on_change(self.child)


def describe_exit(status: int) -> str:
    """Return how a process ended, in words: ``exited with status 1``, ``was ended by SIGKILL``."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
