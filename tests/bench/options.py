"""What a run of the benchmark is told."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig

from tests.bench.report import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """``dtype`` computes our side, ``bare_dtype`` the bare loop; ``quick`` measures fewer rounds and smaller rows.

    ``processor_time`` counts the seconds of our process instead of the clock's: on a machine that others load, one
    thread's are the steady ones.
    """

    model: Path
    dtype: torch.dtype
    bare_dtype: torch.dtype
    quick: bool
    threads: int
    repeat: int | None
    processor_time: bool = False

    @property
    def clock(self) -> Clock:
        return time.process_time if self.processor_time else time.perf_counter

    def times(self, full: int, quick: int) -> int:
        return self.repeat or (quick if self.quick else full)

    @property
    def vocab(self) -> int:
        return AutoConfig.from_pretrained(self.model).vocab_size

    @property
    def mode(self) -> str:
        ours, bare = name_of(self.dtype), name_of(self.bare_dtype)
        seconds = ", processor seconds" if self.processor_time else ""
        return f"{ours}{'' if bare == ours else f' (bare loop: {bare})'}, {self.threads} threads{seconds}"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
