"""The process that tries constraints out: ``python -m gateway.grammars.child``.

It reads one JSON object a line, ``{"id": 1, "kind": "regex", "text": "a+"}``, and answers each with a line
``{"id": 1, "error": null}``. Each is compiled in a fork of its own, by the library that engines are pinned to,
over an alphabet of bytes. The kernel ends a fork that takes too long or too much memory; that is an
answer as well.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

PROCESSOR_S = 2
WALL_S = 5.0
MEMORY_BYTES = 512 * 1024 * 1024  # beyond what the process has at its start
MAX_MESSAGE = 300  # characters

Compile = Callable[[str, str], None]


def main() -> None:
    compile_one = _compiler()
    running: dict[int, int] = {}  # request by process

    def reap(_: int = 0, __: FrameType | None = None) -> None:
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            number = running.pop(pid, None)
            if number is not None and status:
                _say(number, f"takes more than {PROCESSOR_S} s or {MEMORY_BYTES >> 20} MiB to compile")

    signal.signal(signal.SIGCHLD, reap)
    _say(0, None)
    for line in sys.stdin:
        asked = json.loads(line)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if not pid:
            _try(compile_one, asked)
        running[pid] = asked["id"]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _try(compile_one: Compile, asked: Mapping[str, Any]) -> None:
    """Compile under limits, answer, and end the fork."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with open("/proc/self/statm") as statm:
        most = int(statm.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_S, PROCESSOR_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_REAL, WALL_S)
    error = None
    try:
        compile_one(asked["kind"], asked["text"])
    except MemoryError:
        os._exit(1)
    except Exception as refusal:  # whatever the library raises is its verdict
        error = str(refusal).strip() or type(refusal).__name__
        if "bad_alloc" in error:  # how it tells of a want of memory
            os._exit(1)
    _say(asked["id"], error)
    os._exit(0)


def _say(number: int, error: str | None) -> None:
    """One write below PIPE_BUF: lines of several processes do not mix."""
    said = None if error is None else error[-MAX_MESSAGE:]
    os.write(1, json.dumps({"id": number, "error": said}).encode() + b"\n")


def _compiler() -> Compile:
    import xgrammar

    info = xgrammar.TokenizerInfo(
        [bytes([value]) for value in range(256)], vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[0]
    )
    parsers: Mapping[str, Callable[[str], Any]] = {
        "json": xgrammar.Grammar.from_json_schema,
        "regex": xgrammar.Grammar.from_regex,
        "grammar": xgrammar.Grammar.from_ebnf,
    }

    def compile_one(kind: str, text: str) -> None:
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        compiler.compile_grammar(parsers[kind](text))

    return compile_one


if __name__ == "__main__":
    main()
