"""`make bench-gateway`: what the gateway costs, beside an engine called directly and alone.

Beside vLLM: the same closed loop of short chats, 1, 8 and 64 at a time, whole and streamed, against the engine and
through the gateway with auth, limits and ledger on, in turn. Each turn's two sides are compared with each other; the
figures are medians of these pairs. Alone: in front of a scripted engine, requests per second of the gateway's own
processor time, with the ledger and without. The load comes from a process of its own (``tests.bench.load``).
"""

import argparse
import asyncio
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gateway.engines.launch import EngineSpec, launch_vllm
from gateway.store import open_database
from tests.bench.killable import Killable, Place, scripted_place
from tests.bench.load import Load, Measured
from tests.engines.fixtures import all_cores, endpoint_of, running_engine, vocab_size_of
from tests.stack import free_port
from tests.tiny_model import smollm_directory

THROUGHPUT_BAR = 0.90  # of the engine's own, 8 at a time
ADDED_BAR_MS = 5.0  # to the median of a lone call
ALONE_BAR = 300.0  # requests a second and core
REQUESTS = {1: 25, 8: 40, 64: 128}  # of one side's turn, by how many at a time
TURNS = {1: 4}  # in an alternation: what a lone call takes moves with the machine from one second to the next
TOKENS = {1: 4}  # of an answer, else 16: what is added to a lone call is small beside what every token varies by
PATH = "/v1/chat/completions"
QUESTION = "What is 2 + 3? Reply with the number only."
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Figures:
    """What programs read: one line each at the end."""

    lines: list[str] = field(default_factory=list[str])
    missed: list[str] = field(default_factory=list[str])

    def add(self, line: str, *, holds: bool | None = None) -> None:
        self.lines.append(line)
        if holds is False:
            self.missed.append(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One end of the comparison."""

    url: str
    key: str
    model: str

    def turn(self, *, concurrency: int, requests: int, stream: bool, tokens: int | None = None) -> Measured:
        """Send the load and return what came of it.

        Raises:
            RuntimeError: an answer was no success.
        """
        load = Load(
            url=self.url,
            path=PATH,
            headers={"Authorization": f"Bearer {self.key}"},
            body={
                "model": self.model,
                "messages": [{"role": "user", "content": QUESTION}],
                "max_tokens": TOKENS.get(concurrency, 16) if tokens is None else tokens,
                "temperature": 1.0,
                "seed": 7,
                "stream": stream,
                "ignore_eos": True,
            },
            concurrency=concurrency,
            requests=requests,
        )
        done = subprocess.run(
            [sys.executable, "-m", "tests.bench.load"], input=json.dumps(asdict(load)), capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        measured = Measured(**json.loads(done.stdout))
        if set(measured.statuses) != {"200"}:
            raise RuntimeError(f"not every answer was a success: {measured.statuses}")
        return measured


def beside_vllm(direct: Side, through: Side, gateway: Callable[[], float], alternations: int, figures: Figures) -> None:
    """Compare; ``gateway`` returns its processor seconds so far."""
    for concurrency, requests in REQUESTS.items():
        for stream in (False, True):
            name = f"c{concurrency}{'_stream' if stream else ''}"
            for side in (direct, through):  # connections, caches and compiled paths of both
                side.turn(concurrency=concurrency, requests=concurrency, stream=stream)
            pairs: list[tuple[Measured, Measured]] = []
            spent = gateway()
            turns = alternations * TURNS.get(concurrency, 1)
            for number in range(turns):
                sides = (direct, through) if number % 2 else (through, direct)
                both = {side: side.turn(concurrency=concurrency, requests=requests, stream=stream) for side in sides}
                pairs.append((both[direct], both[through]))
            spent = (gateway() - spent) / (turns * requests)
            ratios = [mine.throughput / theirs.throughput for theirs, mine in pairs]
            added = {at: [1e3 * (mine.at(at) - theirs.at(at)) for theirs, mine in pairs] for at in (0.5, 0.95)}
            p50, p95 = (statistics.median(values) for values in added.values())
            first = statistics.median(1e3 * (mine.first_at(0.5) - theirs.first_at(0.5)) for theirs, mine in pairs)
            ratio = statistics.median(ratios)
            generator = statistics.median(mine.cpu_seconds for _, mine in pairs)
            print(
                f"{name:12} direct {statistics.median(t.throughput for t, _ in pairs):7.2f}/s, "
                f"through {statistics.median(m.throughput for _, m in pairs):7.2f}/s: {ratio:.3f} "
                f"({min(ratios):.3f} to {max(ratios):.3f}); added p50 {p50:.1f} ms ({min(added[0.5]):.1f} to "
                f"{max(added[0.5]):.1f}), p95 {p95:.1f} ms, to the first byte {first:.1f} ms; processor a request: "
                f"gateway {1e3 * spent:.2f} ms, generator {1e3 * generator / requests:.2f} ms",
                flush=True,
            )
            figures.add(f"RATIO throughput_{name} {ratio:.4g}", holds=ratio >= THROUGHPUT_BAR if name == "c8" else None)
            if concurrency == 1:
                suffix = "_stream" if stream else ""
                figures.add(f"ADDED p50_ms{suffix} {p50:.3g}", holds=None if stream else p50 <= ADDED_BAR_MS)
                figures.add(f"ADDED p95_ms{suffix} {p95:.3g}")
                if stream:  # its reader waits for the first token
                    figures.add(f"ADDED first_p50_ms{suffix} {first:.3g}", holds=first <= ADDED_BAR_MS)


def alone(place: Place, module: str, *, seconds: float, concurrency: int = 8) -> tuple[float, float, float]:
    """Return requests per second of the gateway's processor time and of the clock, and the generator's processor
    seconds per request."""
    (key,) = place.new_keys(1)
    gateway = place.gateway(module, module=module)
    gateway.start()
    try:
        side = Side(url=gateway.url, key=key, model=place.endpoint.name)
        warm = side.turn(concurrency=concurrency, requests=200, stream=False)
        requests = max(concurrency, int(warm.throughput * seconds))
        spent = processor_seconds(gateway)
        measured = side.turn(concurrency=concurrency, requests=requests, stream=False)
        spent = processor_seconds(gateway) - spent
    finally:
        gateway.stop()
    return requests / spent, measured.throughput, measured.cpu_seconds / requests


def commit_ms(place: Place, count: int = 200) -> float:
    """Return the median of a lone durable commit on the place's database, in milliseconds."""

    async def measure() -> list[float]:
        times: list[float] = []
        settings = place.settings
        async with open_database(settings.resolved_database_url, blob_dir=settings.blob_dir) as database:
            for number in range(count):
                started = time.perf_counter()
                async with database.write() as unit:
                    await unit.keys.ensure_project(f"commit {number}")
                times.append(time.perf_counter() - started)
        return times

    return 1e3 * statistics.median(asyncio.run(measure()))


def processor_seconds(gateway: Killable) -> float:
    """Return the user and system time of the process so far."""
    assert gateway.process is not None
    fields = Path(f"/proc/{gateway.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def vllm_part(alternations: int, figures: Figures) -> None:
    with tempfile.TemporaryDirectory(prefix="loopline-bench-") as scratch:
        model = smollm_directory()
        spec = EngineSpec(
            model_path=model,
            served_name="smollm2",
            port=free_port(),
            key=secrets.token_hex(16),
            max_lora_rank=8,
            threads=all_cores(),
        )
        with running_engine(launch_vllm(spec), spec.url, Path(scratch) / "engine.log"):
            place = Place(data_dir=Path(scratch) / "data", endpoint=endpoint_of(spec, vocab_size=vocab_size_of(model)))
            place.prepare()
            figures.add(f"COMMIT p50_ms {commit_ms(place):.3g}")
            (key,) = place.new_keys(1)
            gateway = place.gateway("gateway")
            gateway.start()
            try:
                direct = Side(url=spec.url, key=spec.key, model=spec.served_name)
                through = Side(url=gateway.url, key=key, model=spec.served_name)
                beside_vllm(direct, through, lambda: processor_seconds(gateway), alternations, figures)
            finally:
                gateway.stop()


def alone_part(rounds: int, seconds: float, figures: Figures) -> None:
    with scripted_place("sqlite") as place:
        figures.add(f"COMMIT alone_p50_ms {commit_ms(place):.3g}")
        found: dict[str, list[tuple[float, float, float]]] = {"gateway": [], "tests.bench.unledgered": []}
        for _ in range(rounds):
            for module, values in found.items():
                values.append(alone(place, module, seconds=seconds))
    for name, values in (("with", found["gateway"]), ("without", found["tests.bench.unledgered"])):
        core, clock, generator = (statistics.median(column) for column in zip(*values, strict=True))
        print(
            f"alone {name} ledger: {core:.0f} requests a second and core ({min(v[0] for v in values):.0f} to "
            f"{max(v[0] for v in values):.0f}), {clock:.0f} by the clock; generator {1e3 * generator:.2f} ms a request"
        )
        suffix = "" if name == "with" else "_without_ledger"
        figures.add(f"ALONE requests_per_core{suffix} {core:.4g}", holds=core >= ALONE_BAR if name == "with" else None)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gateway", description=__doc__)
    parser.add_argument("--alternations", type=int, default=5, help="of each load beside vLLM; 0: leave that part out")
    parser.add_argument("--rounds", type=int, default=3, help="of the gateway alone; 0: leave that part out")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each of those rounds")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that engines and gateways are ended
    figures = Figures()
    if options.rounds:
        alone_part(options.rounds, options.seconds, figures)
    if options.alternations:
        vllm_part(options.alternations, figures)
    print("\n".join(figures.lines))
    for line in figures.missed:
        print(f"missed its bar: {line}")
    return 1 if figures.missed else 0


if __name__ == "__main__":
    sys.exit(main())
