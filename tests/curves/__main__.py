"""``python -m tests.curves``: does the trainer learn what a plain transformers + PEFT loop learns?

SFT on 200 chats in float32: the mean loss per token of every step, to be within 1e-3. GRPO on addition in the machine's
compute mode: the final reward over seeds, to be within noise. Exit status 1 when one of them is not.
"""

import argparse
import math
import sys
from pathlib import Path
from statistics import fmean, stdev

import torch
from transformers import AutoTokenizer

from tests.curves.compare import Addition, grpo, sft
from tests.curves.loops import Setup
from tests.tiny_model import smollm_directory
from trainer.decoder import default_compute_dtype
from trainer.peft_backend import configure_torch

SFT_BAR = 1e-3  # nats per token
LAST = 3  # the final reward is the mean over the last steps


def say(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="sft,grpo")
    parser.add_argument("--model", type=Path, help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--seeds", default="1,2,3", help="of GRPO; SFT takes the first")
    parser.add_argument("--steps", type=int, default=8, help="of GRPO")
    parser.add_argument("--problems", type=int, default=8, help="per step of GRPO")
    parser.add_argument("--samples", type=int, default=8, help="answers to each problem")
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    configure_torch(arguments.threads)
    model = arguments.model or smollm_directory()
    tokenizer = AutoTokenizer.from_pretrained(model)
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    failed = False
    if "sft" in arguments.rows:
        setup = Setup(model=model, dtype="float32", learning_rate=3e-4, seed=seeds[0])
        curves = sft(setup, tokenizer, examples=arguments.examples, batch=16, note=say)
        say(
            f"RESULT sft farthest {curves.farthest:.2e} (bar {SFT_BAR:.0e}), "
            f"loss {curves.ours[0]:.3f} to {curves.ours[-1]:.3f}"
        )
        failed |= not curves.farthest < SFT_BAR
    if "grpo" in arguments.rows:
        dtype = str(default_compute_dtype(torch.device("cpu"))).removeprefix("torch.")
        finals: list[tuple[float, float]] = []
        for seed in seeds:
            setup = Setup(model=model, dtype=dtype, learning_rate=3e-4, seed=seed)
            task = Addition(steps=arguments.steps, problems=arguments.problems, samples=arguments.samples)
            curves = grpo(setup, tokenizer, task, say)
            finals.append((fmean(curves.plain[-LAST:]), fmean(curves.ours[-LAST:])))
            say(f"RESULT grpo seed {seed} final reward plain {finals[-1][0]:.3f} ours {finals[-1][1]:.3f} ({dtype})")
        if len(finals) > 1:
            plain, ours = zip(*finals, strict=True)
            noise = 2 * math.hypot(stdev(plain), stdev(ours)) / math.sqrt(len(finals))
            apart = abs(fmean(plain) - fmean(ours))
            say(
                f"RESULT grpo final reward plain {fmean(plain):.3f} ours {fmean(ours):.3f}, "
                f"apart {apart:.3f}, two standard errors {noise:.3f}"
            )
            failed |= not apart <= noise
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
