"""Measurements that need a process of their own: peak memory, and gradients in another dtype."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from tests.bench import batches
from tests.bench.batches import Batch


def peak_bytes(side: str, row: str, model: Path, dtype: torch.dtype, threads: int) -> int:
    """Return the peak resident size of a fresh process that runs two steps of ``row``."""
    arguments = [side, row, str(model), str(dtype).removeprefix("torch."), str(threads)]
    command = [sys.executable, "-m", "tests.bench.fresh", *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["peak_bytes"]


def fidelity(model: Path, dtype: torch.dtype, seed: int) -> dict[str, float]:
    """Return the cosine of ``LoraDecoder``'s gradient in ``dtype`` to that of the bare loop in float32."""
    from transformers import AutoTokenizer

    from tests.bench.bare import BareLoop
    from tests.bench.ours import DecoderLoop

    tokenizer = AutoTokenizer.from_pretrained(model)
    tasks = {"arithmetic_grpo": batches.real_grpo(tokenizer, seed), "chat_sft": batches.real_sft(tokenizer, seed)}
    bare, ours = BareLoop(model, torch.float32, seed=seed), DecoderLoop(model, dtype)
    bare.calm()
    ours.load(bare.parameters)
    cosines: dict[str, float] = {}
    for name, batch in tasks.items():
        batch = batches.with_sampled(batch, bare.logprobs(batch))
        cosines[name] = _cosine(_gradient(bare, batch), _gradient(ours, batch))
    return cosines


def _gradient(loop, batch: Batch) -> Tensor:
    for parameter in loop.parameters.values():
        parameter.grad = None
    loop.forward_backward(batch)
    named = {name.replace(".default", ""): p.grad for name, p in loop.parameters.items()}
    return torch.cat([named[name].double().flatten() for name in sorted(named)])


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a, b) / (a.norm() * b.norm()))


def main() -> None:
    side, row, model, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    from transformers import AutoConfig

    from tests.bench.bare import BareLoop
    from tests.bench.ours import DecoderLoop

    vocab = AutoConfig.from_pretrained(model).vocab_size
    batch = batches.sft(vocab) if row == "sft" else batches.grpo(vocab, groups=4, samples=8, prompt=512, response=64)
    loop = (BareLoop if side == "bare" else DecoderLoop)(Path(model), getattr(torch, dtype))
    for _ in range(2 if row == "sft" else 1):
        loop.forward_backward(batch)
        loop.optim_step()
    print(json.dumps({"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))


if __name__ == "__main__":
    main()
