"""What durability costs: group commit with slow fsyncs.

``python -m tests.bench.store``: 64 submitters with every fsync delayed by 2.6 ms (strace), with group commit and with a
commit per submit. Ends with 1 when there are fewer than 8 acknowledgements per fsync, or less than 5 times the
throughput.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import migrations
from gateway.store import open_database, writer
from tests.store.bench import HandClock, open_bench

SUBMITTERS = 64
FSYNC_US = 2600
LEAST_ACKS_PER_FSYNC = 8.0
LEAST_SPEED_UP = 5.0


async def many_submit(url: str, directory: Path, *, rounds: int) -> dict[str, float]:
    """Let 64 submitters submit ``rounds`` operations each, one after the other."""
    async with open_database(url, blob_dir=directory / "blobs", clock=HandClock()) as database:
        bench = await open_bench(database, HandClock())
        sessions = [await bench.open() for _ in range(SUBMITTERS)]
        before, started = database.commits, time.perf_counter()

        async def submitter(number: int) -> None:
            for _ in range(rounds):
                await bench.submit(sessions[number])

        await asyncio.gather(*(submitter(number) for number in range(SUBMITTERS)))
        seconds = time.perf_counter() - started
        return {"acks": SUBMITTERS * rounds, "commits": database.commits - before, "seconds": seconds}


def under_strace(mode: str, rounds: int) -> dict[str, float]:
    """Run ``many_submit`` in a process whose fsyncs take 2.6 ms longer; add the number of fsyncs."""
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "trace"
        migrations.upgrade(f"sqlite:///{directory}/loopline.db")
        command = [
            *("strace", "-f", "--seccomp-bpf", "-qq", "-e", "trace=fsync,fdatasync", "-o", str(trace)),
            *("-e", f"inject=fsync,fdatasync:delay_exit={FSYNC_US}"),
            *(sys.executable, "-m", "tests.bench.store", "--child", mode, "--rounds", str(rounds), directory),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        lines = trace.read_text().splitlines()
    return {**json.loads(done.stdout.splitlines()[-1]), "fsyncs": sum("sync(" in line for line in lines)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--child", choices=("group", "alone"))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("directory", nargs="?", type=Path)
    arguments = parser.parse_args()
    if arguments.child is not None:
        url = f"sqlite:///{arguments.directory}/loopline.db"
        if arguments.child == "alone":
            writer.MAX_GROUP_UNITS, writer._OTHERS_TURN_S = 1, 0.0  # pyright: ignore[reportPrivateUsage]
        print(json.dumps(asyncio.run(many_submit(url, arguments.directory, rounds=arguments.rounds))))
        return
    group, alone = (under_strace(mode, arguments.rounds) for mode in ("group", "alone"))
    start = under_strace("group", 0)["fsyncs"]
    per_fsync, speed_up = group["acks"] / (group["fsyncs"] - start), alone["seconds"] / group["seconds"]
    for name, found in (("group commit", group), ("commit per submit", alone)):
        rate = found["acks"] / found["seconds"]
        per_commit = found["acks"] / found["commits"]
        print(f"{name:18} {rate:8.0f} acks/s, {per_commit:6.1f} per commit, {found['fsyncs'] - start:.0f} fsyncs")
    print(f"{per_fsync:.1f} acks per fsync with group commit (at least {LEAST_ACKS_PER_FSYNC:g})")
    print(f"speed-up {speed_up:.1f}x with fsyncs of {FSYNC_US / 1000} ms (at least {LEAST_SPEED_UP:g})")
    if per_fsync < LEAST_ACKS_PER_FSYNC or speed_up < LEAST_SPEED_UP:
        sys.exit("MISSED")


if __name__ == "__main__":
    main()
