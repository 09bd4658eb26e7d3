"""strace, and reading its output: which bytes were on disk when an acknowledgement left. Pure.

Lines are those of ``strace -f -ttt -T -yy -s N``: process, start time, call with the paths of its descriptors, result
and duration. A call that another thread interrupted stands on two lines, which are joined here.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

SYSCALLS = "pwrite64,pwritev,write,writev,sendto,sendmsg,fsync,fdatasync,rename,renameat,renameat2"
_SHOWN_BYTES = 16384  # two pages of PostgreSQL
_LINE = re.compile(r"^(\d+)\s+(\d+\.\d+)\s+(.*)$")
_CALL = re.compile(r"^(\w+)\((.*)\)\s+=\s+(-?\d+|\?).*?<(\d+\.\d+)>$", re.DOTALL)
_UNFINISHED = " <unfinished ...>"
_RESUMED = re.compile(r"^<\.\.\. \w+ resumed>(.*)$", re.DOTALL)
_PATH = re.compile(r"^\d+<([^>]*)>")
_HEADER = ", 32, 0"  # the bytes of SQLite's log header, at the log's beginning
_RENAMED = re.compile(r'"((?:[^"\\]|\\.)*)"')


def command(output: Path, *, failing: str = "") -> list[str]:
    """Return what to put before a command so that its calls are written to ``output``; its pid stays its own.

    Args:
        failing: which syncs of each thread fail with EIO, as strace says it (``9+4``: the 9th, then every 4th).
    """
    shown = ["-ttt", "-T", "-yy", "-s", str(_SHOWN_BYTES), "-e", f"trace={SYSCALLS}", "-e", "signal=none"]
    inject = ["-e", f"inject=fsync,fdatasync:error=EIO:when={failing}"] if failing else []
    return ["strace", "-D", "-f", "--seccomp-bpf", "-qqq", *shown, *inject, "-o", str(output)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One system call. ``path`` is what its first descriptor leads to, for a rename the new name."""

    name: str
    began: float
    ended: float
    result: int
    path: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What an acknowledged operation needs on disk: a log record with its id, and a body file if it has one."""

    operation_id: str
    body_file: str | None


def parse(lines: Iterable[str]) -> list[Call]:
    """Return the finished calls in the order of their ends."""
    begun: dict[str, tuple[float, str]] = {}
    calls: list[Call] = []
    for line in lines:
        if (found := _LINE.match(line.rstrip("\n"))) is None:
            continue
        pid, at, text = found[1], float(found[2]), found[3]
        if text.endswith(_UNFINISHED):
            begun[pid] = (at, text.removesuffix(_UNFINISHED))
            continue
        if (resumed := _RESUMED.match(text)) is not None:
            if pid not in begun:
                continue
            at, head = begun.pop(pid)
            text = head + resumed[1]
        if (call := _CALL.match(text)) is None or call[3] == "?":
            continue
        calls.append(
            Call(
                name=call[1],
                began=at,
                ended=at + float(call[4]),
                result=int(call[3]),
                path=_path_of(call[1], call[2]),
                arguments=call[2],
            )
        )
    return sorted(calls, key=lambda one: one.ended)


def _path_of(name: str, arguments: str) -> str:
    if name.startswith("rename"):
        names = _RENAMED.findall(arguments)
        return names[-1] if names else ""
    found = _PATH.match(arguments)
    return found[1] if found else ""


def unsupported(calls: Sequence[Call], needs: Needs, *, log: str) -> list[str]:
    """Return what was not on disk when the first answer that names the operation left; nothing when all was.

    Args:
        log: part of the path of the database's log (``loopline.db-wal``, ``pg_wal/``).
    """
    id = needs.operation_id
    if (sent := _answered(calls, id)) is None:
        return [f"{id}: no answer was seen"]
    recorded = _recorded(calls, id, log)
    if recorded == math.inf:
        return [f"{id}: no log record was seen"]
    found: list[str] = []
    if not _synced(calls, log, after=recorded, before=sent):
        found.append(f"{id}: answered before its log record was synced")
    if needs.body_file is not None:
        found += _body(calls, needs.body_file, sent, id)
    return found


def failed_syncs(calls: Sequence[Call], log: str) -> list[Call]:
    """Return the syncs of the database's log that failed."""
    return [call for call in calls if call.name in ("fsync", "fdatasync") and log in call.path and call.result != 0]


def unhealed(calls: Sequence[Call], acknowledged: Sequence[Needs], *, log: str) -> list[str]:
    """Return after which failed syncs of SQLite's log an answer left before the log had begun anew, with its header.

    What a failed sync did not write no later one will: the log may have a hole there, which hides all that follows.
    An answer whose record an earlier sync put on disk may leave at any time: it lies before the hole.
    """
    answers = [
        (sent, _recorded(calls, needs.operation_id, log))
        for needs in acknowledged
        if (sent := _answered(calls, needs.operation_id)) is not None
    ]
    return [
        f"answered {after - failed.ended:.3f} s after a failed sync of the log, which went on behind the hole"
        for failed in failed_syncs(calls, log)
        if (
            after := min(
                (
                    sent
                    for sent, recorded in answers
                    if sent > failed.ended and not _synced(calls, log, after=recorded, before=failed.began)
                ),
                default=None,
            )
        )
        is not None
        and not any(
            call.name == "pwrite64"
            and log in call.path
            and call.arguments.endswith(_HEADER)
            and failed.ended <= call.began
            and call.ended <= after
            for call in calls
        )
    ]


def _recorded(calls: Sequence[Call], id: str, log: str) -> float:
    """Return when the first record of the log that names ``id`` was written; infinity if none was."""
    return min(
        (call.ended for call in calls if log in call.path and "write" in call.name and id in call.arguments),
        default=math.inf,
    )


def _answered(calls: Sequence[Call], id: str) -> float | None:
    """Return when the first answer that names ``id`` left."""
    return min((call.began for call in calls if id in call.arguments and _is_http(call.path)), default=None)


def _body(calls: Sequence[Call], file: str, sent: float, id: str) -> list[str]:
    """The body was synced under its temporary name, renamed, and the directory's entry synced."""
    directory, _, digest = file.rpartition("/")
    renames = [call for call in calls if call.path == file and call.name.startswith("rename") and call.ended <= sent]
    if not renames:
        return [f"{id}: answered before its body had its name"]
    renamed = renames[0]
    found: list[str] = []
    if not _synced(calls, f"{directory}/.{digest}", after=0.0, before=renamed.began):
        found.append(f"{id}: its body got its name before its content was synced")
    if not any(
        call.name in ("fsync", "fdatasync") and call.path == directory and call.result == 0
        for call in calls
        if renamed.ended <= call.began and call.ended <= sent
    ):
        found.append(f"{id}: answered before the directory of its body was synced")
    return found


def _synced(calls: Sequence[Call], path: str, *, after: float, before: float) -> bool:
    return any(
        call.name in ("fsync", "fdatasync")
        and path in call.path
        and call.result == 0
        and after <= call.began
        and call.ended <= before
        for call in calls
    )


def _is_http(path: str) -> bool:
    return path.startswith("TCP")
