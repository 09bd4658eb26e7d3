"""The warm parent: it imports everything once and then forks real gateways, trainers and engines in a moment.

A start from cold costs 6 to 9 s of imports. A forked child runs the same ``main`` on the same code in a session of its
own, without threads taken over, and is killed like any other. Requests and answers are lines of JSON on stdin and
stdout; when stdin ends, or the parent dies, its children are killed.
"""

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_IMPORTED = (
    "torch",
    "peft",
    "transformers.models.llama.modeling_llama",
    "trainer.peft_backend",
    "trainer.__main__",
    "gateway.__main__",
    "gateway.app",
    "psycopg",
    "uvicorn.protocols.http.httptools_impl",
    "uvicorn.lifespan.on",
    "tests.crash.engine",
    "tests.crash.planted",
)


def mains() -> dict[str, Callable[[list[str]], Any]]:
    """Return what a child may become, by name."""
    from gateway.__main__ import main as gateway
    from tests.crash.engine import main as engine
    from tests.crash.planted import main as planted
    from trainer.__main__ import main as trainer

    return {"gateway": lambda _: gateway(), "trainer": trainer, "engine": engine, "planted": planted}


def main() -> None:
    """Serve requests until stdin ends."""
    for name in _IMPORTED:
        importlib.import_module(name)
    programs = mains()
    children: set[int] = set()
    print("ready", flush=True)
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            children.discard(request["wait"])
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _become(programs[request["program"]], request)
        children.add(pid)
        while os.getpgid(pid) != pid:  # until it leads a group, a kill of the group would miss it
            time.sleep(0.0005)
        print(pid, flush=True)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _become(run: Callable[[list[str]], Any], request: dict[str, Any]) -> NoReturn:
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    status = 1
    try:
        status = run(request["arguments"]) or 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
