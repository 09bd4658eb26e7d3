"""Rows that need the running system: the SDK against gateway, database, trainer process and a vLLM engine.

The engine with ``--max-lora-rank 8`` serves both the system's rows and the first half of ``lora_sampling``.
"""

import json
import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import loopline
from gateway.engines.launch import EngineSpec, launch_vllm
from tests.bench import batches, sampling
from tests.bench.batches import Batch
from tests.bench.options import Options
from tests.bench.report import Report, Timed
from tests.engines.fixtures import all_cores, endpoint_of, running_engine
from tests.stack import Stack, free_port, running_stack

ADAM = loopline.AdamParams(learning_rate=1e-4)
RANKS = (8, 32)


def rows(options: Options, report: Report) -> None:
    """end_to_end, latencies and lora_sampling."""
    shares: list[float] = []
    with tempfile.TemporaryDirectory(prefix="loopline-bench-") as scratch:
        adapters = sampling.write_adapters(options, Path(scratch))
        for rank in RANKS:
            spec = _spec(options, rank)
            with running_engine(launch_vllm(spec), spec.url, Path(scratch) / f"engine-{rank}.log"):
                if rank == RANKS[0]:
                    endpoint = endpoint_of(spec, vocab_size=options.vocab)
                    with running_stack(endpoint, Path(scratch) / "stack") as stack:
                        _system(stack, options, report)
                shares.append(sampling.measure(spec, adapters, options, report, f"--max-lora-rank {rank}"))
        report.ratio("lora_sampling", min(shares), options.mode)
        if not options.quick:
            spec = _spec(options, RANKS[-1])
            launch = launch_vllm(spec)
            stock = {**launch.environment, "VLLM_PLUGINS": ""}
            launch = type(launch)(command=launch.command, environment=stock)
            with running_engine(launch, spec.url, Path(scratch) / "engine-stock.log"):
                sampling.measure(spec, adapters, options, report, "stock vLLM, rank 32")


def _system(stack: Stack, options: Options, report: Report) -> None:
    batch = batches.sft(options.vocab)
    with (
        loopline.ServiceClient(stack.url, stack.key) as service,
        service.create_lora_training_client(stack.base_model, rank=8, alpha=16, seed=0) as training,
    ):
        _end_to_end(stack, training, batch, options, report)
        _latencies(training, options, report)


def _end_to_end(
    stack: Stack, training: loopline.TrainingClient, batch: Batch, options: Options, report: Report
) -> None:
    """A step of ``sft`` as the cookbook takes it: both calls made, then both results waited for."""
    data = _datums(batch)

    def step() -> None:
        backward, stepped = training.forward_backward(data), training.optim_step(ADAM)
        backward.result()
        stepped.result()

    step()
    known = len(_trainer_seconds(stack))
    seen = _times(step, options.times(9, 5))
    inside = _trainer_seconds(stack)[known:]
    steps = [sum(inside[at : at + 2]) for at in range(0, len(inside), 2)]
    report.seconds("end_to_end", "seen by the SDK", seen)
    report.seconds("end_to_end", "inside the trainer", Timed(seconds=steps))
    shares = Timed(seconds=[mine / whole for mine, whole in zip(steps, seen.seconds, strict=True)])
    report.ratio("end_to_end", shares.median, f"{shares.spread()}; {options.mode}")


def _latencies(training: loopline.TrainingClient, options: Options, report: Report) -> None:
    """Of single calls, as the SDK sees them. The adapter changes before every save, as in an RL loop."""
    times = options.times(9, 5)
    small = _datums(batches.sft(options.vocab, count=1, length=64))
    taken: dict[str, list[float]] = {}

    def clocked(name: str, call: Callable[[], object]) -> None:
        start = time.perf_counter()
        call()
        taken.setdefault(name, []).append(time.perf_counter() - start)

    def sampled() -> None:
        sampler = training.save_weights_and_get_sampling_client()
        sampler.sample([1, 2, 3], 1, loopline.SamplingParams(max_tokens=1)).result()

    for _ in range(times + 1):
        clocked("forward, one datum of 64 tokens", lambda: training.forward(small).result())
        training.forward_backward(small).result()
        clocked("optim_step", lambda: training.optim_step(ADAM).result())
        clocked("save_weights, published", lambda: training.save_weights_for_sampler().result())
        training.forward_backward(small).result()
        training.optim_step(ADAM).result()
        clocked("save_weights to the first sample", sampled)
    for name, seconds in taken.items():
        report.milliseconds("latency", name, Timed(seconds=seconds[1:]))
    report.add("latency", "torch.compile", "-", "", "no setting: the decoder's passes are written by hand")


def _datums(batch: Batch) -> list[loopline.Datum]:
    return [
        loopline.Datum(d.tokens.tolist(), {"target_tokens": d.targets.tolist(), "weights": d.weights.tolist()})
        for d in batch.datums
    ]


def _times(call: Callable[[], object], times: int) -> Timed:
    seconds: list[float] = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return Timed(seconds=seconds)


def _trainer_seconds(stack: Stack) -> list[float]:
    """Return how long the trainer took for each forward_backward and optim_step, from its log."""
    found: list[float] = []
    for line in (stack.data_dir / "trainer.log").read_text().splitlines():
        record = json.loads(line) if line.startswith("{") else {}
        if record.get("event") == "operation_done" and record["kind"] in ("forward_backward", "optim_step"):
            found.append(record["seconds"])
    return found


def _spec(options: Options, rank: int) -> EngineSpec:
    return EngineSpec(
        model_path=options.model,
        served_name="bench",
        port=free_port(),
        key=secrets.token_hex(16),
        max_lora_rank=rank,
        threads=all_cores(),
    )
