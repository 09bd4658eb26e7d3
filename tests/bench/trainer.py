"""The trainer against a well-written bare loop: ``python -m tests.bench.trainer [--quick] [--rows sft,grpo_short]``.

Both sides run in one process, alternating, so that a noisy machine disturbs both; memory is measured with each side in
a fresh process. A row prints medians with minimum and maximum, and a line ``RATIO <name> <value>``.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.bench import batches
from tests.bench.batches import Batch
from tests.bench.fresh import fidelity, peak_bytes
from trainer.decoder import default_compute_dtype

MODEL = Path(".loopline/models/smollm2-135m-instruct")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BARS = {"sft": 1.4, "grpo_short": 3.0, "grpo_long": 4.5, "memory": 1.6, "fidelity": 0.99, "tenants8": 1.2}


@dataclass(frozen=True, kw_only=True)
class Options:
    model: Path
    dtype: torch.dtype
    bare_dtype: torch.dtype
    quick: bool
    threads: int
    repeat: int | None

    def times(self, full: int, quick: int) -> int:
        return self.repeat or (quick if self.quick else full)


@dataclass(frozen=True, kw_only=True)
class Side:
    """What to time."""

    name: str
    run: Callable[[], object]


def alternate(sides: Sequence[Side], times: int) -> dict[str, list[float]]:
    """Return seconds per side, measured in turn after one untimed round each."""
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    for turn in range(times + 1):
        for side in sides:
            start = time.perf_counter()
            side.run()
            if turn:
                seconds[side.name].append(time.perf_counter() - start)
    return seconds


def report(name: str, options: Options, seconds: Mapping[str, Sequence[float]], tokens: int) -> None:
    for side, values in seconds.items():
        median = statistics.median(values)
        spread = f"{min(values):.3f} to {max(values):.3f}"
        print(
            f"{name:12} {side:6} {median:8.3f} s  ({spread})  {tokens / median:8.0f} tokens/s  {mode(options)}",
            flush=True,
        )
    bare, ours = (statistics.median(seconds[side]) for side in ("bare", "ours"))
    ratio(name, bare / ours)


def ratio(name: str, value: float) -> None:
    print(f"RATIO {name} {value:.4g} (bar {BARS[name]})", flush=True)


def mode(options: Options) -> str:
    bare, ours = (str(dtype).removeprefix("torch.") for dtype in (options.bare_dtype, options.dtype))
    return f"{ours}{'' if bare == ours else f' (bare loop: {bare})'}, {options.threads} threads"


def step_row(name: str, batch: Batch, options: Options, times: int, *, minibatch: int = 16) -> None:
    """``forward_backward`` and ``optim_step`` of one batch."""
    from tests.bench.bare import BareLoop
    from tests.bench.ours import DecoderLoop

    bare, ours = BareLoop(options.model, options.bare_dtype), DecoderLoop(options.model, options.dtype)

    def step(loop: BareLoop | DecoderLoop) -> None:
        loop.forward_backward(batch, minibatch=minibatch)
        loop.optim_step()

    sides = [Side(name="bare", run=lambda: step(bare)), Side(name="ours", run=lambda: step(ours))]
    report(name, options, alternate(sides, times), batch.tokens)


def sft(options: Options) -> None:
    step_row("sft", batches.sft(_vocab(options)), options, options.times(5, 3))


def grpo_short(options: Options) -> None:
    batch = batches.grpo(_vocab(options), groups=8, samples=8, prompt=40, response=12)
    step_row("grpo_short", batch, options, options.times(5, 2))


def grpo_long(options: Options) -> None:
    """The bare loop takes minibatches of 4: with 16 its logits alone need tens of gigabytes."""
    groups = 1 if options.quick else 4
    batch = batches.grpo(_vocab(options), groups=groups, samples=8, prompt=512, response=64)
    step_row("grpo_long", batch, options, options.times(2, 1), minibatch=4)
    peak = peak_bytes("ours", "grpo_long", options.model, options.dtype, options.threads)
    print(f"grpo_long    ours   peak {peak / 2**30:.2f} GiB (bar below 4)", flush=True)


def memory(options: Options) -> None:
    dtypes = {"bare": options.bare_dtype, "ours": options.dtype}
    peaks = {side: peak_bytes(side, "sft", options.model, dtype, options.threads) for side, dtype in dtypes.items()}
    for side, peak in peaks.items():
        print(f"memory       {side:6} {peak / 2**30:8.2f} GiB peak resident  {mode(options)}", flush=True)
    ratio("memory", peaks["bare"] / peaks["ours"])


def fidelity_row(options: Options) -> None:
    """Gradient cosine to float32 on real text, the lowest over seeds; float32 mode is compared with the bare loop."""
    lowest = 1.0
    for seed in range(1 if options.quick else 3):
        for task, cosine in fidelity(options.model, options.dtype, seed).items():
            print(f"fidelity     {task:16} seed {seed}  {cosine:.5f}  {mode(options)}", flush=True)
            lowest = min(lowest, cosine)
    ratio("fidelity", lowest)


def tenants8(options: Options) -> None:
    """Eight sessions with two datums of 32 positions each, interleaved, against eight bare loops in sequence."""
    from tests.bench.bare import BareLoop
    from tests.bench.ours import DecoderLoop

    work = [batches.sft(_vocab(options), count=2, length=32, seed=seed) for seed in range(8)]
    loops = [BareLoop(options.model, options.bare_dtype, seed=seed) for seed in range(8)]
    first = DecoderLoop(options.model, options.dtype)
    tenants = [first, *(DecoderLoop(options.model, options.dtype, seed=s, model=first.model) for s in range(1, 8))]

    def bare() -> None:
        for loop, batch in zip(loops, work, strict=True):
            loop.forward_backward(batch)
            loop.optim_step()

    def ours() -> None:
        for loop, batch in zip(tenants, work, strict=True):
            loop.forward_backward(batch)
        for loop in tenants:
            loop.optim_step()

    seconds = alternate([Side(name="bare", run=bare), Side(name="ours", run=ours)], options.times(5, 3))
    report("tenants8", options, seconds, sum(batch.tokens for batch in work))


def optimizer(options: Options) -> None:
    """AdamW on the adapter's masters: torch's default, and fused."""
    shapes = [p.shape for p in _loop(options).parameters.values()]
    seconds: dict[str, list[float]] = {}
    for name, fused in (("default", False), ("fused", True)):
        masters = [torch.zeros(shape, requires_grad=True) for shape in shapes]
        for master in masters:
            master.grad = torch.randn(master.shape)
        step = torch.optim.AdamW(masters, lr=1e-5, fused=fused).step
        seconds |= alternate([Side(name=name, run=step)], 9)
    for name, values in seconds.items():
        spread = f"{min(values) * 1e3:.1f} to {max(values) * 1e3:.1f}"
        print(f"optimizer    {name:8} {statistics.median(values) * 1e3:6.1f} ms  ({spread})", flush=True)


ROWS: Mapping[str, Callable[[Options], None]] = {
    "sft": sft,
    "grpo_short": grpo_short,
    "grpo_long": grpo_long,
    "memory": memory,
    "fidelity": fidelity_row,
    "tenants8": tenants8,
    "optimizer": optimizer,
}


def _loop(options: Options):
    from tests.bench.ours import DecoderLoop

    return DecoderLoop(options.model, options.dtype)


def _vocab(options: Options) -> int:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(options.model).vocab_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and one group in grpo_long")
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--mode", choices=DTYPES, help="compute dtype; default: the machine's")
    parser.add_argument("--bare-mode", choices=DTYPES, help="compute dtype of the bare loop; default: as --mode")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=int, help="timed rounds of each row")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = DTYPES[arguments.mode] if arguments.mode else default_compute_dtype(torch.device("cpu"))
    options = Options(
        model=arguments.model,
        dtype=dtype,
        bare_dtype=DTYPES[arguments.bare_mode] if arguments.bare_mode else dtype,
        quick=arguments.quick,
        threads=arguments.threads,
        repeat=arguments.repeat,
    )
    for row in arguments.rows.split(","):
        ROWS[row](options)


if __name__ == "__main__":
    main()
