"""The trainer against a well-written bare loop: ``make bench-trainer [QUICK=1]``, or ``python -m tests.bench.trainer``.

Medians with minimum and maximum of rounds that alternate between the sides; every row prints its mode. The rows are
described where they are measured.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers.utils import logging

from tests.bench import fresh, served, steps
from tests.bench.options import Options
from tests.bench.report import Report
from tests.tiny_model import smollm_directory
from trainer.decoder import default_compute_dtype

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROWS: Mapping[str, Callable[[Options, Report], None]] = {
    "fidelity": fresh.fidelity,  # first: the other bars count in a mode that passes it
    "sft": steps.sft,
    "grpo_short": steps.grpo_short,
    "grpo_long": steps.grpo_long,
    "memory": fresh.memory,
    "tenants8": steps.tenants8,
    "served": served.rows,  # end_to_end, latencies and lora_sampling share the start of an engine
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, one seed, one group in grpo_long")
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--model", type=Path, help="default: SmolLM2-135M-Instruct, prepared where it is not")
    parser.add_argument("--mode", choices=DTYPES, help="compute dtype; default: the machine's")
    parser.add_argument("--bare-mode", choices=DTYPES, help="compute dtype of the bare loop; default: as --mode")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeat", type=int, help="timed rounds of each row")
    parser.add_argument("--processor-time", action="store_true", help="count our own seconds, with --threads 1")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that engines and stacks are ended
    torch.set_num_threads(arguments.threads)
    dtype = DTYPES[arguments.mode] if arguments.mode else default_compute_dtype(torch.device("cpu"))
    options = Options(
        model=arguments.model or smollm_directory(),
        dtype=dtype,
        bare_dtype=DTYPES[arguments.bare_mode] if arguments.bare_mode else dtype,
        quick=arguments.quick,
        threads=arguments.threads,
        repeat=arguments.repeat,
        processor_time=arguments.processor_time,
    )
    report = Report()
    try:
        for row in arguments.rows.split(","):
            ROWS[row](options, report)
    finally:
        report.finish()


if __name__ == "__main__":
    main()
