"""Run operations in a process of their own and print, as JSON, how far resident memory rose above where it was.

``python -m tests.trainer.memory_probe MODEL DTYPE CASE...`` with cases like ``lean:256x128`` (datums x tokens),
``plain:1x2048`` or ``lean:4x512x16`` (alternatives per position).
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from gateway.core.catalog import BaseModel
from gateway.core.tensors import Datum, TensorData
from tests.trainer.builders import A, forward_backward, lora
from trainer.peft_backend import PeftBackend, configure_torch


def resident(field: str) -> int:
    """Return ``VmRSS`` or ``VmHWM`` (its peak) in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def datums(count: int, length: int, k: int, vocabulary: int) -> tuple[Datum, ...]:
    rng = random.Random(count + length)
    shape = (length,) if k == 1 else (length, k)
    return tuple(
        Datum(
            model_input=TensorData.ints(rng.choices(range(vocabulary), k=length)),
            loss_fn_inputs={
                "target_tokens": TensorData.ints(rng.choices(range(vocabulary), k=length * k), shape),
                "weights": TensorData.floats([0.01] * (length * k), shape),
            },
        )
        for _ in range(count)
    )


def main() -> None:
    path, dtype, *cases = sys.argv[1:]
    configure_torch(threads=1)
    vocabulary: int = AutoConfig.from_pretrained(path).vocab_size
    base = BaseModel(
        name="probe",
        path=Path(path),
        dtype=dtype,
        vocab_size=vocabulary,
        context_length=1 << 20,
        max_lora_rank=8,
        max_loras=1,
        engines=(),
    )
    found: dict[str, Any] = {}
    backends = {
        way: PeftBackend(
            base,
            device=torch.device("cpu"),
            compute_dtype=dtype,
            micro_batch_tokens=512,
            operation_bytes=3 << 30,
            lean=way == "lean",
        )
        for way in {case.partition(":")[0] for case in cases}
    }
    for backend in backends.values():
        backend.open(A, lora(unembed=True))
        backend.forward_backward(A, forward_backward(datums(1, 64, 1, vocabulary)))
    for case in cases:
        way, _, size = case.partition(":")
        count, length, *k = (int(number) for number in size.split("x"))
        payload = forward_backward(datums(count, length, *(k or [1]), vocabulary))
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
        before = resident("VmRSS")
        result = backends[way].forward_backward(A, payload)
        found[case] = {
            "rose": resident("VmHWM") - before,
            "bound": result.metrics["memory_bound_bytes:max"],
            "tokens": count * length,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
