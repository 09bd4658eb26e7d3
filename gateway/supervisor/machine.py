"""What this machine offers: cores, a GPU, and which build of vLLM is installed."""

import importlib.metadata
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Up to this many cores, engine and trainer both use all: they mostly take turns. Above, each gets half.
_SHARED_CORES = 4
_BFLOAT16_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})  # x86 and Arm


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """``cores`` are the numbers of those this process may run on, in order.

    ``cpu_bfloat16`` says that the CPU multiplies bfloat16 in hardware; others emulate it, far slower than float32.
    """

    cores: Sequence[int]
    has_gpu: bool
    cpu_bfloat16: bool

    @property
    def engine_cores(self) -> str:
        """The engine's cores as a list that vLLM understands: ``0-1`` or ``0-3,8-11``."""
        cores = self.cores if len(self.cores) <= _SHARED_CORES else self.cores[: len(self.cores) // 2]
        return _as_ranges(cores)

    @property
    def trainer_threads(self) -> int:
        if len(self.cores) <= _SHARED_CORES:
            return len(self.cores)
        return len(self.cores) - len(self.cores) // 2


def inspect_machine() -> Machine:
    """Look at the machine. A GPU counts when the kernel has one and the installed vLLM can use it."""
    has_device = any(Path("/dev").glob("nvidia[0-9]*"))
    return Machine(
        cores=sorted(os.sched_getaffinity(0)),
        has_gpu=has_device and installed_version("vllm") is not None,
        cpu_bfloat16=multiplies_bfloat16(Path("/proc/cpuinfo")),
    )


def multiplies_bfloat16(cpuinfo: Path) -> bool:
    """Read from Linux's description of the CPU whether it has bfloat16 products; False when there is none to read."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return not _BFLOAT16_FLAGS.isdisjoint(flags.split())


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, None when there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _as_ranges(numbers: Sequence[int]) -> str:
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ",".join(f"{low}-{high}" if high > low else f"{low}" for low, high in ranges)
