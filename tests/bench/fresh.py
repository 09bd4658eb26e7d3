"""Measurements that need a process of their own: peak memory, and gradients in another dtype."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from tests.bench import batches, ours
from tests.bench.options import Options, name_of
from tests.bench.report import Report
from trainer import memory as resident


def memory(options: Options, report: Report) -> None:
    """Peak resident bytes of two ``sft`` steps, everything included: interpreter, torch, weights."""
    peaks = {side: peak_bytes(side, "sft", options) for side in ("bare", "ours")}
    for side, words in (("bare", "bare loop"), ("ours", "ours")):
        report.add("memory", f"{words}, peak resident", f"{peaks[side] / 2**30:.2f} GiB")
    report.ratio("memory", peaks["bare"] / peaks["ours"], options.mode)


def fidelity(options: Options, report: Report) -> None:
    """The cosine of our gradient to a bare loop's in float32, on real text; the lowest over batches and seeds."""
    seeds = range(1 if options.quick else 3)
    lowest = 1.0
    for seed in seeds:
        for task, cosine in cosines(options, seed).items():
            report.add("fidelity", f"{task}, seed {seed}", f"{cosine:.5f}")
            lowest = min(lowest, cosine)
    report.ratio("fidelity", lowest, options.mode)


def cosines(options: Options, seed: int) -> dict[str, float]:
    """Return the cosine by task. The adapter is as after a few steps; sampler log-probabilities are the model's own."""
    from transformers import AutoTokenizer

    from tests.bench.bare import BareLoop

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tasks = {"arithmetic GRPO": batches.real_grpo(tokenizer, seed), "chat SFT": batches.real_sft(tokenizer, seed)}
    bare = BareLoop(options.model, torch.float32, seed=seed)
    bare.calm()
    loop = ours.BackendLoop(options.model, options.dtype, options.threads)
    loop.load(bare.masters())
    found: dict[str, float] = {}
    for name, batch in tasks.items():
        batch = batches.with_sampled(batch, bare.logprobs(batch))
        bare.forward_backward(batch)
        loop.forward_backward(ours.payload(batch))
        found[name] = _cosine(bare.gradients(), loop.gradients())
    return found


def peak_bytes(side: str, row: str, options: Options) -> int:
    """Return the peak resident size of a fresh process that runs two steps of ``row``."""
    dtype = options.bare_dtype if side == "bare" else options.dtype
    arguments = [side, row, str(options.model), name_of(dtype), str(options.threads)]
    command = [sys.executable, "-m", "tests.bench.fresh", *arguments]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)["peak_bytes"]


def _cosine(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    x, y = (torch.cat([side[name].double().flatten() for name in a]) for side in (a, b))
    return float(torch.dot(x, y) / (x.norm() * y.norm()))


def main() -> None:
    side, row, path, dtype_name, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    from transformers import AutoConfig

    model, dtype = Path(path), getattr(torch, dtype_name)
    vocab = AutoConfig.from_pretrained(model).vocab_size
    batch = batches.sft(vocab) if row == "sft" else batches.grpo(vocab, groups=4, samples=8, prompt=512, response=64)
    if side == "bare":
        from tests.bench.bare import BareLoop

        bare = BareLoop(model, dtype)
        for _ in range(2):
            bare.forward_backward(batch)
            bare.optim_step()
    else:
        loop, payload = ours.BackendLoop(model, dtype, int(threads)), ours.payload(batch)
        for _ in range(2):
            loop.forward_backward(payload)
            loop.optim_step()
    print(json.dumps({"peak_bytes": resident.peak_bytes()}))


if __name__ == "__main__":
    main()
