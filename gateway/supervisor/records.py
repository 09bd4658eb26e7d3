"""What a supervisor writes down under ``run/``: a lock, one record per child, and where the gateway listens.

A record is written right after its child starts and removed after its group has ended. The records that are there
when a supervisor starts therefore name what a crashed one left running: the orphans, which ``sweep`` ends.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gateway.processes import boot_id, process_info
from gateway.supervisor import groups

_RECORD_SUFFIX = ".child.json"


class AlreadyRunning(Exception):
    """Another supervisor holds the data directory."""

    def __init__(self, data_dir: Path, holder: str) -> None:
        super().__init__(
            f"{data_dir} is in use by another `loopline up` (process {holder or 'unknown'}).\n"
            "Stop that one first, or give this one a --data-dir of its own."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildRecord:
    """One started child. ``pid`` is also its group; ``executable`` is the program it runs."""

    name: str
    pid: int
    start_ticks: int
    boot_id: str
    executable: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where the running gateway of a data directory listens; ``pid`` is its supervisor's."""

    url: str
    pid: int


class RunDir:
    """The ``run`` directory of a data directory, private to the user (0700)."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self.path = data_dir / "run"
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)

    @contextlib.contextmanager
    def lock(self) -> Generator[None]:
        """Hold the data directory; the kernel lets go of it when this process dies in whatever way.

        Raises:
            AlreadyRunning: names the process that holds it.
        """
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise AlreadyRunning(self._data_dir, os.read(descriptor, 20).decode().strip()) from None
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(descriptor)

    def write_child(self, name: str, pid: int) -> None:
        """Record a child that was just started; one that has already died leaves a record all the same."""
        process = process_info(pid)
        record = ChildRecord(
            name=name,
            pid=pid,
            start_ticks=process.start_ticks if process else 0,
            boot_id=boot_id(),
            executable=groups.executable(pid) or "",
        )
        self._write(f"{name}{_RECORD_SUFFIX}", asdict(record))

    def remove_child(self, name: str) -> None:
        (self.path / f"{name}{_RECORD_SUFFIX}").unlink(missing_ok=True)

    def children(self) -> Sequence[ChildRecord]:
        """Return all records; a torn one (the machine died while it was written) counts as none."""
        found: list[ChildRecord] = []
        for path in sorted(self.path.glob(f"*{_RECORD_SUFFIX}")):
            with contextlib.suppress(json.JSONDecodeError, TypeError):
                found.append(ChildRecord(**json.loads(path.read_text())))
        return found

    def write_address(self, address: Address) -> None:
        self._write("gateway.json", asdict(address))

    def remove_address(self) -> None:
        (self.path / "gateway.json").unlink(missing_ok=True)

    def address(self) -> Address | None:
        """Return where the gateway of this data directory listens, if one was announced and its supervisor lives."""
        try:
            address = Address(**json.loads((self.path / "gateway.json").read_text()))
        except (FileNotFoundError, json.JSONDecodeError, TypeError):
            return None
        return address if process_info(address.pid) is not None else None

    def _write(self, name: str, content: dict[str, Any]) -> None:
        """Write whole or not at all."""
        draft = self.path / f"{name}.new"
        draft.write_text(json.dumps(content) + "\n")
        draft.replace(self.path / name)


async def sweep(run_dir: RunDir, *, grace_s: float) -> Sequence[ChildRecord]:
    """End every child that a crashed supervisor left running; return those that still had a live process.

    A group whose number has been taken over by strangers is left alone: either its leader is the recorded process,
    or the leader is dead and a member of it, no older than the record, runs the recorded program.
    """
    ended: list[ChildRecord] = []
    for record in run_dir.children():
        if _is_ours(record):
            await groups.end_group(record.pid, grace_s=grace_s)
            ended.append(record)
        run_dir.remove_child(record.name)
    run_dir.remove_address()
    return ended


def _is_ours(record: ChildRecord) -> bool:
    if record.boot_id != boot_id():
        return False
    leader = process_info(record.pid)
    if leader is not None:
        return leader.start_ticks == record.start_ticks
    return any(
        process.start_ticks >= record.start_ticks and groups.executable(process.pid) == record.executable
        for process in groups.members(record.pid)
    )
