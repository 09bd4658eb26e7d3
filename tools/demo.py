"""`make demo`: run `loopline up` on a free port, the GRPO recipe against it, and leave nothing running.

Ctrl-C at any moment (and SIGTERM) ends the recipe, which stops its session, then the stack. Arguments go on to the
recipe: `.venv/bin/python tools/demo.py --seed 2`.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from console import Refusal, elapsed, say

from gateway.auth.master import open_keyring
from gateway.settings import Settings
from gateway.supervisor.records import RunDir

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "clients" / "cookbook" / "grpo_arithmetic.py"
# The model is small and the time short: rank 8 is what the recipe trains, so the engine need not be ready for more.
UP = ("-m", "gateway.cli", "up", "--model", "smollm2-135m-instruct", "--max-lora-rank", "8")
GRACE_S = 45.0

Child = subprocess.Popen[bytes]


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = time.monotonic()
    data_dir = Path(os.environ.get("LOOPLINE_DATA_DIR") or ROOT / ".loopline").resolve()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    say(f"Starting gateway, trainer and vLLM on {url} (data in {data_dir}); the engine takes most of a minute.")
    stack = start(sys.executable, *UP, "--port", str(port), "--data-dir", str(data_dir))
    recipe: Child | None = None
    try:
        wait_ready(stack, RunDir(data_dir))
        keyring = open_keyring(Settings(data_dir=data_dir))
        os.environ.update(LOOPLINE_BASE_URL=url, LOOPLINE_API_KEY=keyring.text(keyring.local_key_id))
        recipe = start(sys.executable, str(RECIPE), "--plot", str(data_dir / "reward_curve.png"), *sys.argv[1:])
        status = wait_both(recipe, stack)
        verdict = "passed" if status == 0 else f"failed with exit status {status}"
        say(f"\nThe demo {verdict} after {elapsed(started)}.")
        return status
    except Refusal as refusal:
        say(f"The demo cannot go on: {refusal}")
        return 1
    except KeyboardInterrupt:
        say("\nInterrupted.")
        return 130
    finally:
        for signum in (signal.SIGINT, signal.SIGTERM):  # what is left to do is to end what was started
            signal.signal(signum, signal.SIG_IGN)
        if recipe is not None:
            end(recipe, signal.SIGINT)
        end(stack, signal.SIGTERM)


def free_port() -> int:
    """Return a TCP port of the loopback interface that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(*command: str) -> Child:
    """Start a child in a session of its own, so that a Ctrl-C reaches it only through us, in the right order."""
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True)


def wait_ready(stack: Child, run_dir: RunDir) -> None:
    """Block until the stack has written down where it listens, which it does when all of it is ready.

    Raises:
        Refusal: the stack ended first; it has said why.
    """
    while True:
        try:
            stack.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            address = run_dir.address()
            if address is not None and address.pid == stack.pid:
                return
        else:
            raise Refusal(f"`loopline up` ended with exit status {stack.returncode}; the reason is above")


def wait_both(recipe: Child, stack: Child) -> int:
    """Return the recipe's exit status.

    Raises:
        Refusal: the stack ended while the recipe ran.
    """
    while True:
        try:
            return recipe.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            if stack.poll() is not None:
                raise Refusal(f"`loopline up` ended with exit status {stack.returncode}; the reason is above") from None


def end(child: Child, signum: signal.Signals) -> None:
    """Ask a child to end; kill its process group when it does not within GRACE_S."""
    if child.poll() is not None:
        return
    child.send_signal(signum)
    try:
        child.wait(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


if __name__ == "__main__":
    sys.exit(main())
