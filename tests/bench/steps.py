"""Rows that time training steps: the bare loop and our backend in one process, in turn."""

import time

import torch

from tests.bench import batches, ours
from tests.bench.bare import BareLoop
from tests.bench.batches import Batch
from tests.bench.fresh import peak_bytes
from tests.bench.options import Options
from tests.bench.ours import BackendLoop
from tests.bench.report import LONG_PEAK_GIB, Report, Side, Timed, alternate

PASSES = 2  # products per frozen weight and token: forward, and the gradient of its input


def sft(options: Options, report: Report) -> None:
    """16 datums of 128 tokens, all positions trained; against a bare loop with eager attention too."""
    batch = batches.sft(options.vocab)
    timed = _against_bare("sft", batch, options, report, options.times(5, 3))
    model = BackendLoop(options.model, options.dtype, options.threads).backend.model
    weights = sum(m.weight.numel() for m in model.modules().values() if isinstance(m, torch.nn.Linear))
    rate = 2 * weights * batch.tokens * PASSES / timed.median
    peak = _matmul_rate(options.dtype)
    report.add("sft", "of this dtype's matmul rate", f"{rate / peak:.0%}", "", f"{peak / 1e9:.0f} GFLOP/s measured")
    if options.quick:
        return
    eager = BareLoop(options.model, options.bare_dtype, attention="eager")
    side = Side(name="eager", run=lambda: _bare_step(eager, batch, 16))
    seconds = alternate([side], options.times(3, 1), options.clock)["eager"]
    report.seconds("sft", "bare loop, eager attention", seconds, f"ratio {seconds.median / timed.median:.2f}")


def grpo_short(options: Options, report: Report) -> None:
    """8 groups of 8 samples; prompt 40, response 12, loss on the response."""
    batch = batches.grpo(options.vocab, groups=8, samples=8, prompt=40, response=12)
    _against_bare("grpo_short", batch, options, report, options.times(5, 2))


def grpo_long(options: Options, report: Report) -> None:
    """4 groups (quick: 1) of 8 samples; prompt 512, response 64. The bare loop takes minibatches of 4: with 16 its full
    logits need more than 24 GiB.
    """
    groups = 1 if options.quick else 4
    batch = batches.grpo(options.vocab, groups=groups, samples=8, prompt=512, response=64)
    _against_bare("grpo_long", batch, options, report, options.times(3, 1), minibatch=4)
    peak = peak_bytes("ours", "grpo_long", options) / 2**30
    verdict = "holds" if peak < LONG_PEAK_GIB else "missed"
    report.add("grpo_long", f"ours, peak resident (below {LONG_PEAK_GIB:g}: {verdict})", f"{peak:.2f} GiB")


def tenants8(options: Options, report: Report) -> None:
    """8 sessions with 2 datums of 32 tokens each, interleaved, against 8 bare loops one after the other.

    One bare model stands for the eight: its weights stay in the cache, which only flatters it.
    """
    work = [batches.sft(options.vocab, count=2, length=32, seed=seed) for seed in range(8)]
    payloads = [ours.payload(batch) for batch in work]
    bare = BareLoop(options.model, options.bare_dtype)
    loop = BackendLoop(options.model, options.dtype, options.threads, sessions=8)

    def one_after_the_other() -> None:
        for batch in work:
            _bare_step(bare, batch, 16)

    def interleaved() -> None:
        for session, payload in enumerate(payloads):
            loop.forward_backward(payload, session)
        for session in range(8):
            loop.optim_step(session)

    sides = [Side(name="bare", run=one_after_the_other), Side(name="ours", run=interleaved)]
    timed = alternate(sides, options.times(5, 3), options.clock)
    _compare("tenants8", timed, sum(batch.tokens for batch in work), options, report)


def _against_bare(
    name: str, batch: Batch, options: Options, report: Report, times: int, *, minibatch: int = 16
) -> Timed:
    """Time ``forward_backward`` and ``optim_step`` of one batch; return our side."""
    bare, loop = BareLoop(options.model, options.bare_dtype), BackendLoop(options.model, options.dtype, options.threads)
    payload = ours.payload(batch)

    def step() -> None:
        loop.forward_backward(payload)
        loop.optim_step()

    sides = [Side(name="bare", run=lambda: _bare_step(bare, batch, minibatch)), Side(name="ours", run=step)]
    timed = alternate(sides, times, options.clock)
    _compare(name, timed, batch.tokens, options, report)
    return timed["ours"]


def _bare_step(bare: BareLoop, batch: Batch, minibatch: int) -> None:
    bare.forward_backward(batch, minibatch=minibatch)
    bare.optim_step()


def _compare(name: str, timed: dict[str, Timed], tokens: int, options: Options, report: Report) -> None:
    for side, words in (("bare", "bare loop"), ("ours", "ours")):
        report.seconds(name, words, timed[side], f"{tokens / timed[side].median:,.0f} tokens/s")
    report.ratio(name, timed["bare"].median / timed["ours"].median, options.mode)


def _matmul_rate(dtype: torch.dtype) -> float:
    """Return the best floating-point rate of a few shapes as a layer has them, in FLOP/s."""
    best = 0.0
    for rows, inner, columns in ((2048, 576, 1536), (2048, 1536, 576), (512, 576, 1536), (2048, 2048, 2048)):
        a, b = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
        for _ in range(20):
            start = time.perf_counter()
            torch.mm(a, b.t())
            best = max(best, 2 * rows * inner * columns / (time.perf_counter() - start))
    return best
